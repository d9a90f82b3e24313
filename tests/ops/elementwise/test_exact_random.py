"""`use_exact_random`: the random numbers of split tensors are those of one process."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridShardStrategy, Tiles, UnsupportedOperationError
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.ops.attention.rule import _dropped_as_one
from lightning_shard.ops.elementwise import random
from tests.pairs import choose
from tests.parity import mesh_of

SHAPE = (2, 3, 14, 9)
MAKERS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "all dropped": lambda x: F.dropout(x, 1.0),
    "module": lambda x: nn.Dropout(0.3)(x) * nn.Dropout2d(0.4)(x),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x.mean(1), 0.4),
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "dropout3d": lambda x: F.dropout3d(x, 0.4),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "float32": lambda x: F.dropout(x.float(), 0.4),
    "channels_last": lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4),
    "permuted": lambda x: F.dropout(x.permute(0, 2, 3, 1), 0.4),
    "reduced": lambda x: F.dropout(x.sum(3), 0.4),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x.detach(), 0.3),
    "poisson": lambda x: torch.poisson(x.abs()),
    "normal": lambda x: torch.normal(x, 0.1) + torch.normal(0.5, x.abs()),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: x.clone().exponential_(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3) + x.clone().bernoulli_(x.sigmoid()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "plain tensors between": lambda x: F.dropout(x, 0.4) * torch.rand(()) + F.dropout(x, 0.2),
    "in a checkpoint": lambda x: checkpoint(F.dropout, x, 0.4, use_reentrant=False),
}


def exactly(function, *args):
    with lightning_shard.use_exact_random():
        return function(*args)


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("maker", "dims"), choose(MAKERS, [[2], [2, 3]]), ids=str)
def test_equals_one_process(maker, dims):
    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    split = lightning_shard.shard(x.detach(), mesh, dims).clone().requires_grad_()
    torch.manual_seed(3)
    wanted = MAKERS[maker](x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    found = exactly(MAKERS[maker], split)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(lightning_shard.gather(found), wanted, rtol=1e-14, atol=1e-14)
    if wanted.requires_grad:
        (gradient,) = exactly(torch.autograd.grad, found.square().sum(), split)
        (expected,) = torch.autograd.grad(wanted.square().sum(), x)
        torch.testing.assert_close(lightning_shard.gather(gradient), expected)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (2, 0, 3, 1)], ids=str)
def test_ranks_agree_on_the_order_of_dims_in_memory(rows, order):
    """One row of a dim says nothing of the order, which the strides of the whole say."""
    torch.manual_seed(0)
    x = torch.randn([(2, 3, rows, 9)[d] for d in order], dtype=torch.float64)
    x = x.permute([order.index(d) for d in range(4)])
    split = lightning_shard.shard(x, mesh_of(3), 2)
    torch.manual_seed(3)
    wanted = F.dropout(x, 0.4)
    torch.manual_seed(3)
    found = lightning_shard.gather(exactly(F.dropout, split, 0.4))
    assert torch.equal(found, wanted)
    everyone = [torch.empty_like(found) for _ in range(3)]
    dist.all_gather(everyone, found.contiguous())
    assert all(torch.equal(each, found) for each in everyone)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("draw", "dtype"), [("normal_", torch.float32), ("random_", torch.int64)])
def test_a_generator_of_the_user(draw, dtype):
    """No call is tried with it."""
    x = torch.ones(SHAPE, dtype=dtype)
    split = lightning_shard.shard(x, mesh_of(3), 2)
    wanted = getattr(x.clone(), draw)(generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    found = exactly(lambda: getattr(split.clone(), draw)(generator=generator))
    assert torch.equal(lightning_shard.gather(found), wanted)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(6, 4, 3, stride=2),
            nn.Dropout2d(0.4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(16, 3),
        ).double()  # fmt: skip

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(Callback):
    """The losses; each step starts from a seed of its own."""

    def __init__(self):
        self.losses = []

    def on_train_batch_start(self, trainer, module, batch, index):
        torch.manual_seed(index)

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(float(outputs["loss"]))


def trainer_of(exact_random, *callbacks):
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridShardStrategy(domain_parallel_size=2, exact_random=exact_random),
        plugins=TorchElasticEnvironment(),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


@pytest.mark.quick_rows("None")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("option", [True, None])
def test_training_with_dropout_equals_one_process(option):
    """By the strategy's option, or by the block around the fit that the default leaves alone."""
    torch.manual_seed(1)
    module, batches = Net(), torch.randn(4, 3, 2, 11, 8, dtype=torch.float64)
    alone = Net()
    alone.load_state_dict(module.state_dict())
    optimizer, losses = alone.configure_optimizers(), []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        loss = alone.training_step(batch, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    recorder = Recorder()
    with nullcontext() if option else lightning_shard.use_exact_random():
        trainer_of(option, recorder).fit(module, DataLoader(list(batches), batch_size=None))
        assert random.is_exact() is not option  # what was before the fit holds again
    assert not random.is_exact()
    torch.testing.assert_close(recorder.losses, losses, rtol=1e-10, atol=0)
    state = full_module_state(module)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_exact_is_refused():
    """Kernels of other devices than the CPU draw in orders of their own."""
    x, split = torch.empty(1, 1, 6, 4, device="meta"), mock.Mock()
    with pytest.raises(UnsupportedOperationError, match="use_exact_random"):
        _dropped_as_one(split, (x, x, x, None), 0.5, is_causal=False)


class Fails(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        assert random.is_exact()
        raise ZeroDivisionError("the first batch")


@pytest.mark.spmd(2)
def test_the_option_ends_with_a_fit_that_fails():
    batches = DataLoader(list(torch.randn(2, 3, 2, 11, 8).double()), batch_size=None)
    with pytest.raises(ZeroDivisionError, match="the first batch"):
        trainer_of(True, Fails()).fit(Net(), batches)
    assert not random.is_exact()


def test_blocks_nest_and_are_left_by_an_error():
    with lightning_shard.use_exact_random():
        with lightning_shard.use_exact_random(False):
            assert not random.is_exact()
        assert random.is_exact()
        with pytest.raises(ZeroDivisionError), lightning_shard.use_exact_random(False):
            _ = 1 / 0
        assert random.is_exact()
    assert not random.is_exact()


def test_blocks_of_threads_that_overlap_leave_the_mode_as_it_was():
    """As calls of one network in tiles by several threads."""
    first, second = lightning_shard.use_exact_random(), lightning_shard.use_exact_random()
    with ExitStack() as other:
        with first:
            other.enter_context(second)
        assert random.is_exact()
    assert not random.is_exact()


def test_a_call_without_a_block_is_deprecated():
    try:
        with pytest.warns(DeprecationWarning, match="with use_exact_random"):
            lightning_shard.use_exact_random(True)
        assert random.is_exact()
    finally:
        random._exact = False


def test_backward_in_another_thread_draws_the_same():
    """As on a GPU, whose backward runs in a thread of autograd's."""
    with lightning_shard.use_exact_random(), ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: random.is_exact()).result()


def dropped_block(x):
    with torch.no_grad():
        noise = torch.randn_like(x)
    return F.rrelu(nn.Dropout2d(0.4)(x * noise), training=True) * torch.bernoulli(x.sigmoid())


@pytest.mark.spmd(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_backward_draws_again_as_forward_did(exact, reentrant):
    """What is computed again has the numbers that it had, also on the other side of the block."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    for places in (mesh_of(2), Tiles((2,))):
        gradients = []
        for again in (False, True):
            field = lightning_shard.shard(x, places, 2).clone().requires_grad_()
            torch.manual_seed(3)
            with lightning_shard.use_exact_random(exact):
                if again:
                    found = checkpoint(dropped_block, field, use_reentrant=reentrant)
                else:
                    found = dropped_block(field)
            if again:  # a forward pass without backward changes nothing of it
                with lightning_shard.use_exact_random(not exact):
                    dropped_block(field)
            with lightning_shard.use_exact_random(again is not exact):
                found.square().sum().backward()
            gradients.append(lightning_shard.gather(field.grad))
        assert torch.equal(*gradients)


@pytest.mark.spmd(2)
def test_what_only_backward_draws_follows_the_block():
    """Such as the noise that a hook adds to a gradient."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    split = lightning_shard.shard(x, mesh_of(2), 2).clone().requires_grad_()
    split.register_hook(lambda g: g + torch.randn_like(g))
    torch.manual_seed(3)
    wanted = 1 + torch.randn_like(x)
    torch.manual_seed(3)
    exactly(split.sum().backward)
    assert torch.equal(lightning_shard.gather(split.grad), wanted)
