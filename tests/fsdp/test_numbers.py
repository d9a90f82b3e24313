"""Numbers that are read from sharded parameters and gradients are those of one process."""

import copy
import math
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.distributed.tensor import DTensor
from torch.func import functional_call, jvp

from lightning_shard import init_mesh, parallelize, whole_parameters
from lightning_shard.fsdp import meeting
from tests.trainer.featured import Featured, fit_alone, fit_sharded


def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 5)


def numbers(p):
    """Read as hooks and callbacks read them; the parts of a sum are not the sum."""
    return [
        float(p.sum()),
        p.norm().item(),
        p.square().sum().item(),
        float(p.mean()),
        p.abs().max().item(),
        bool(p.sum() > 0),
        bool(p.isfinite().all()),
        p.flatten()[4].item() if p.ndim == 1 else p[4, 3].item(),  # lies on the last rank
    ]


@pytest.mark.spmd(2)
def test_numbers_of_parameters_and_gradients():
    alone, module = layer(), layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    x = torch.ones(3, 4)
    alone(x).square().sum().backward()
    module(x).square().sum().backward()
    for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert numbers(mine) == pytest.approx(numbers(wanted), rel=1e-5)
        assert numbers(mine.grad) == pytest.approx(numbers(wanted.grad), rel=1e-5)
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, numbers(mine))
        assert found[0] == found[1]


@pytest.mark.spmd(4)
def test_extremes_of_fewer_rows_than_ranks():
    torch.manual_seed(0)
    alone = nn.Linear(3, 2)
    module = copy.deepcopy(alone)
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    extremes = (
        lambda p: p.max(),
        lambda p: p.min(),
        lambda p: p.abs().max(),
        lambda p: (10 * p).long().max(),
        lambda p: (p > 0).max(),
        lambda p: (p - math.inf).max(),
        lambda p: p.amax(),
        lambda p: p.amin(0).sum(),
        lambda p: p.argmax(),
        lambda p: p.argmin(-1).sum(),
        lambda p: p.norm(math.inf),
        lambda p: p.norm(-math.inf),
        lambda p: torch.linalg.vector_norm(p, -1),
        lambda p: torch.linalg.vector_norm(p, math.inf, dim=0).sum(),
        lambda p: nn.utils.get_total_norm([p, p], math.inf),
        lambda p: torch._foreach_max([p])[0],
    )
    for mine, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        for i, extreme in enumerate(extremes):
            assert float(extreme(mine.detach())) == float(extreme(wanted.detach())), i


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
    with pytest.raises(RuntimeError, match=r"given a shard .* lightning_shard\.whole_parameters"):
        slope(module, shards)
    with dual_level(), pytest.raises(RuntimeError, match="given a shard"):
        make_dual(module.bias, module.bias.grad)
    whole = {k: grad.full_tensor() for k, grad in shards.items()}
    with whole_parameters(module):
        found = slope(module, whole)
    wanted = slope(alone, {k: p.grad for k, p in alone.named_parameters()})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.spmd(2)
def test_a_rank_that_reads_alone_ends_with_a_sentence():
    module = layer()
    parallelize(module, init_mesh({"data": -1}, "cpu"))
    met = Counter({("number", (0, 1)): 10**6})  # so that the ranks agree on the number of the next
    if dist.get_rank() == 0:
        with (
            mock.patch.object(meeting, "WAIT_S", 0.3),
            mock.patch.object(meeting, "_met", met),
            pytest.raises(RuntimeError, match=r"rank 0 reads .* ranks \[1\] did not within"),
        ):
            float(next(module.parameters()).sum())
    dist.barrier()


class Alone(Featured):
    """Runs its network on rank 0 alone, as a callback that draws pictures does."""

    def on_train_epoch_end(self):
        if dist.get_rank() == 0:
            with (
                mock.patch.object(meeting, "WAIT_S", 0.3),
                mock.patch.object(meeting, "_met", Counter({("module", (0, 1)): 10**6})),
                pytest.raises(
                    RuntimeError,
                    match=r"rank 0 runs Alone outside .*on_train_epoch_end.*ranks \[1\]",
                ),
            ):
                self(torch.ones(1, 1, 9, 7, dtype=torch.float64))
        dist.barrier()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)])
def test_a_rank_that_runs_the_module_alone_ends_with_a_sentence(domain):
    fit_sharded(Alone(), domain, limit_train_batches=1)


class Everywhere(Alone):
    def on_train_epoch_end(self):
        self.seen = self(torch.ones(1, 1, 9, 7, dtype=torch.float64)).sum().item()


@pytest.mark.spmd(2)
def test_all_ranks_may_run_the_module_in_a_hook():
    module, alone = Everywhere(), Everywhere()
    fit_sharded(module, (2,), limit_train_batches=1)
    fit_alone(alone, limit_train_batches=1)
    assert module.seen == pytest.approx(alone.seen, rel=1e-9)
