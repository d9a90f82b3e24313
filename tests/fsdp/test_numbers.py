"""Numbers of sharded parameters and gradients are read of whole ones, and of no others."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.distributed.tensor import DTensor
from torch.func import functional_call, jvp
from torch.nn import functional

from lightning_shard import init_mesh, parallelize, whole_parameters
from lightning_shard.fsdp import rank_barrier
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 5)


# as hooks and callbacks read them; the parts of a sum are not the sum
READS = (
    lambda p: float(p.sum()),
    lambda p: p.norm().item(),
    lambda p: p.square().sum().item(),
    lambda p: p.abs().max().item(),
)


def numbers(p):
    return [read(p) for read in READS]


def gathered_or_refused(of):
    """Torch gathers for this one; torch 2.11 does not, so that it is refused."""
    try:
        return bool(of.isfinite().all())
    except RuntimeError as error:
        return "sharding='none'" in str(error)


@pytest.mark.spmd(2)
def test_numbers_of_parameters_and_gradients():
    alone, module = layer(), layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    x = torch.ones(3, 4)
    alone(x).square().sum().backward()
    module(x).square().sum().backward()
    for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        for of, other in ((mine, wanted), (mine.grad, wanted.grad)):
            assert numbers(of.full_tensor()) == pytest.approx(numbers(other), rel=1e-5)
            for read in READS:
                with pytest.raises(RuntimeError, match=r"full_tensor\(\).*sharding='none'"):
                    read(of)
            assert gathered_or_refused(of)
            assert float(of.mean()) == pytest.approx(float(other.mean()), rel=1e-5)


@pytest.mark.spmd(2)
def test_forward_mode_takes_whole_parameters_and_refuses_shards():
    alone, module = layer(), layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    x = torch.ones(3, 4)

    def slope(module, directions):
        values = {k: p.detach() for k, p in module.named_parameters()}
        return jvp(lambda v: functional_call(module, v, x).square().sum(), (values,), (directions,))

    for each in (alone, module):
        each(x).square().sum().backward()
    shards = {k: p.grad for k, p in module.named_parameters()}
    with pytest.raises(NotImplementedError, match="sharding strategy"):  # torch's own
        slope(module, shards)
    with dual_level(), pytest.raises(NotImplementedError, match="sharding strategy"):
        make_dual(module.bias, module.bias.grad)
    whole = {k: grad.full_tensor() for k, grad in shards.items()}
    with whole_parameters(module):
        found = slope(module, whole)
    wanted = slope(alone, {k: p.grad for k, p in alone.named_parameters()})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Alone(Featured):
    """Runs its network on rank 0 alone, as a callback that draws pictures does."""

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            with (
                mock.patch.object(rank_barrier, "WAIT_S", 0.3),
                mock.patch.object(rank_barrier, "_waits", Counter({("module", (0, 1)): 10**6})),
                pytest.raises(
                    RuntimeError,
                    match=r"rank 0 runs Alone outside of the steps .*ranks \[1\]",
                ),
            ):
                self(torch.ones(1, 1, 9, 7, dtype=torch.float64))
        dist.barrier()


@pytest.mark.quick_rows("domain0")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)])
def test_a_rank_that_runs_the_module_alone_ends_with_a_sentence(domain):
    fit_sharded(Alone(), domain, strategy={"sharding": "full"}, limit_train_batches=1)


class Draws(Featured):
    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self.seen = self(torch.ones(1, 1, 9, 7, dtype=torch.float64))


@pytest.mark.spmd(2)
def test_a_rank_may_run_the_module_alone_if_parameters_are_whole():
    fit_sharded(Draws(), (2,), strategy={"sharding": "none"}, limit_train_batches=1)


class Everywhere(Alone):
    def on_train_epoch_end(self):
        self.seen = self(torch.ones(1, 1, 9, 7, dtype=torch.float64)).sum().item()


@pytest.mark.spmd(2)
def test_all_ranks_may_run_the_module_in_a_hook():
    module, alone = Everywhere(), Everywhere()
    fit_sharded(module, (2,), strategy={"sharding": "full"}, limit_train_batches=1)
    fit_alone(alone, limit_train_batches=1)
    assert module.seen == pytest.approx(alone.seen, rel=1e-9)


WRITES_OF_ROWS = (
    lambda w: w[0].mul_(0.5),
    lambda w: w[1:3].zero_(),
    lambda w: w.data[0].fill_(0.5),
    lambda w: w.chunk(2)[0].mul_(0.5),
    lambda w: w.select(0, 1).zero_(),
    lambda w: w.narrow(0, 1, 2).zero_(),
    lambda w: w[-1].copy_(w[1]),
    lambda w: nn.init.constant_(w[0], 0.2),
    lambda w: w.__setitem__(0, 0.0),
    lambda w: w.__setitem__(slice(1, 3), 0.0),
    lambda w: [row.zero_() for row in w],
)


@pytest.mark.spmd(2)
def test_rows_of_shards_are_refused():
    """They are copies, so what a program writes into them would be lost."""
    module = layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    module(torch.ones(3, 4)).square().sum().backward()
    for tensor in (module.weight, module.weight.grad):
        before = tensor.full_tensor().clone()
        for write in WRITES_OF_ROWS:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"dim 0 .*sharding='none'"):
                write(tensor)
        torch.testing.assert_close(tensor.full_tensor(), before, rtol=0, atol=0)
        with torch.no_grad():
            tensor[:, 1].mul_(2)
            tensor[:].mul_(2)
            tensor.div_(2)
        before[:, 1] *= 2
        torch.testing.assert_close(tensor.full_tensor(), before)
    expected = module.weight.full_tensor().detach().clone()
    with whole_parameters(module), torch.no_grad():  # as the sentence says
        module.weight[0].mul_(0.5)
    expected[0] *= 0.5
    torch.testing.assert_close(module.weight.full_tensor(), expected)


LOSSES = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "soft margin": lambda a, b, **k: functional.soft_margin_loss(a, b.detach(), **k),
    "cross entropy": lambda a, b, **k: functional.binary_cross_entropy(
        a.sigmoid(), b.sigmoid(), **k
    ),
    "cross entropy with logits": functional.binary_cross_entropy_with_logits,
    "distance": lambda a, b, **k: functional.kl_div(a.sigmoid().log(), b.sigmoid(), **k),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_shards_are_those_of_the_whole(name):
    """As of the distance of two layers, which a callback logs; 5 and 6 rows on two ranks."""
    for rows in (5, 6):
        alone, module = ([nn.Linear(4, rows), nn.Linear(4, rows)] for _ in range(2))
        for layers in (alone, module):
            for i, each in enumerate(layers):
                nn.init.uniform_(each.weight, generator=torch.Generator().manual_seed(i))
        for each in module:
            parallelize(each, init_mesh({"data": -1}, "cpu"))
        for reduction in ("mean", "sum"):
            losses = [
                LOSSES[name](a.weight, b.weight, reduction=reduction) for a, b in (module, alone)
            ]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[0].full_tensor(), losses[1], rtol=1e-5, atol=0)
            for mine, wanted in zip(module, alone, strict=True):
                if wanted.weight.grad is None:  # of a target
                    continue
                found = mine.weight.grad.full_tensor()
                torch.testing.assert_close(found, wanted.weight.grad, rtol=1e-5, atol=1e-7)


PENALTIES = {
    "squares": lambda w: w.square().sum(),
    "softmax over rows": lambda w: w.softmax(0).square().sum(),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_of_shards_before_the_backward_pass_of_the_block(name, rows):
    """Its gradient may be whole on each rank, to which FSDP2 would add a shard."""
    alone = nn.Linear(4, rows)
    nn.init.uniform_(alone.weight, generator=torch.Generator().manual_seed(0))
    module = copy.deepcopy(alone)
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    for at_once in (False, True):
        for each in (alone, module):
            each.zero_grad()
            penalty = PENALTIES[name](each.weight)
            if isinstance(penalty, DTensor):
                penalty = penalty.full_tensor()
            if at_once:
                (each(torch.ones(3, 4)).square().sum() + penalty).backward()
            else:
                penalty.backward()
                each(torch.ones(3, 4)).square().sum().backward()
        found = module.weight.grad.full_tensor()
        torch.testing.assert_close(found, alone.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.spmd(2)
def test_rows_that_are_written_by_their_numbers_are_refused():
    """Torch would lose what is written, and take the shards for the whole."""
    module = layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    number, value = torch.tensor([0]), torch.tensor([0.5])
    before = module.bias.full_tensor().detach().clone()
    for write in ("index_add_", "index_copy_"):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"dim 0 .*sharding='none'"):
            getattr(module.bias, write)(0, number, value)
    torch.testing.assert_close(module.bias.full_tensor(), before, rtol=0, atol=0)
    with whole_parameters(module), torch.no_grad():  # as the sentence says
        module.bias.index_add_(0, number, value)
    before[0] += 0.5
    torch.testing.assert_close(module.bias.full_tensor(), before)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("rows", [3, 4])
def test_convolutions_of_shards_are_refused(rows):
    """Torch gives those of the shards, as if of the whole: as of two kernels that are merged."""
    first, second = nn.Conv2d(2, rows, 3), nn.Conv2d(2, 5, 1)
    for each in (first, second):
        parallelize(each, init_mesh({"data": -1}, "cpu"))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"convolution .*sharding='none'"):
        functional.conv2d(first.weight, second.weight)
    with pytest.raises(RuntimeError, match="got mixed torch"):
        functional.conv2d(torch.ones(1, 2, 5, 5), first.weight)  # explain.py adds the ways out
    found = functional.conv2d(first.weight.full_tensor(), second.weight.full_tensor())
    assert found.shape == (rows, 5, 3, 3)


class WithoutNumbers(Featured):
    """Has a parameter without numbers, as a network with an option that is switched off."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) + self.extra.sum()


class WithIntegers(Featured):
    """Has parameters that can have no gradients, as quantized weights."""

    def __init__(self):
        super().__init__()
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x):
        return super().forward(x) + (self.steps * self.mask).sum() / 10


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "gradients", "none"])
@pytest.mark.parametrize("kind", [WithoutNumbers, WithIntegers])
def test_parameters_without_numbers_or_gradients(kind, sharding):
    alone, module = kind(), kind()
    fit_alone(alone)
    fit_sharded(module, (2,), strategy={"sharding": sharding})
    assert_same_state(module, alone)
