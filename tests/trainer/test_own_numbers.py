"""Ranks of one domain that give functions other numbers compute other networks: refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_shard.tensor.calls import Calls, counted_calls
from lightning_shard.trainer.same_steps import SameSteps
from tests.trainer.featured import Featured, fit_sharded
from tests.trainer.test_fabric_loops import fabric_with
from tests.trainer.test_fabric_same_steps import train

DRAWS = {
    "factor": lambda x, rng: x * rng.random(),
    "factor of NumPy": lambda x, rng: x * np.float32(rng.random()),
    "sign": lambda x, rng: x * rng.choice([-1.0, 1.0]),
    "tensor": lambda x, rng: x * torch.tensor(rng.random()),
    "noise levels": lambda x, rng: x * torch.from_numpy(rng.random(len(x))).view(-1, 1, 1, 1),
    "order of samples": lambda x, rng: x + x[torch.from_numpy(rng.permutation(len(x)))],
    "noise": lambda x, rng: x + torch.from_numpy(rng.normal(size=x.shape)),
    "crop": lambda x, rng: x[..., (at := int(rng.integers(4))) : at + 3],
    "turn": lambda x, rng: x.roll(int(rng.integers(6)), -1),
    "mask": lambda x, rng: x.where(torch.from_numpy(rng.random(x.shape[-1]) < 0.5), 0.0),
}
NAMES = {"order of samples": "__getitem__", "noise": "add", "crop": "__getitem__", "turn": "roll",
         "mask": "where"}  # fmt: skip


class Augments(Featured):
    """Draws from a generator of its own, of which each process has another one."""

    def __init__(self, draw, seed):
        super().__init__()
        self.draw, self.rng = draw, np.random.default_rng(seed)

    def loss(self, batch):
        return DRAWS[self.draw](self(batch["x"]), self.rng).square().mean()


@pytest.mark.quick_rows("factor of NumPy", "noise levels", "order of samples", "crop")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_of_one_rank_are_refused(draw):
    words = rf"rank 1 has given Tensor\.{NAMES.get(draw, 'mul')} other numbers.*than rank 0"
    seeds = (1, 3)  # the first numbers of every kind differ
    with pytest.raises(ValueError, match=words):
        fit_sharded(Augments(draw, seeds[dist.get_rank()]), (2,), limit_val_batches=0)


AUGMENTATIONS = {
    "factor": DRAWS["factor"],
    "turn": lambda x, rng: x.rot90(int(rng.integers(4)), (2, 3)),
    "flip": lambda x, rng: x.flip(-1) if rng.random() < 0.5 else x,
    "order": lambda x, rng: x[torch.from_numpy(rng.permutation(len(x)))],
    "crop": lambda x, rng: x[..., : 4 + int(rng.integers(4))],
}


class AugmentsBatches(Augments):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        turned = {"x": AUGMENTATIONS[self.draw](batch["x"], self.rng)}
        return batch | turned if self.draw in ("factor", "flip", "order") else turned

    def loss(self, batch):
        return self(batch["x"]).square().mean()


@pytest.mark.quick_rows("turn", "order")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("draw", AUGMENTATIONS)
def test_batches_that_a_hook_augments_otherwise_are_refused(draw):
    words = r"rank 1 has another batch \['x'\] after on_after_batch_transfer"
    with pytest.raises(ValueError, match=words):
        fit_sharded(AugmentsBatches(draw, (1, 3)[dist.get_rank()]), (2,), limit_val_batches=0)


@pytest.mark.spmd(2)
def test_batches_that_a_hook_augments_alike_are_served():
    for draw in ("turn", "crop"):
        fit_sharded(AugmentsBatches(draw, 1), (2,), limit_val_batches=0, max_epochs=2)


@pytest.mark.spmd(2)
def test_generators_that_are_seeded_alike_are_served():
    for draw in ("factor", "noise levels", "crop"):
        fit_sharded(Augments(draw, 1), (2,), limit_val_batches=0, max_epochs=2)


@pytest.mark.spmd(2)
def test_replicas_may_draw_other_numbers():
    fit_sharded(Augments("factor", dist.get_rank()), (1,), limit_val_batches=0)


@pytest.mark.spmd(2)
def test_another_factor_on_one_rank_in_a_loop_of_fabric_is_refused():
    fabric = fabric_with(domain_parallel_size=2)
    with pytest.raises(ValueError, match=r"rank 1 has given Tensor\.mul other numbers"):
        train(fabric, lambda fabric, y: (y * (2.0 + fabric.global_rank)).square().mean())


@pytest.mark.spmd(2)
def test_a_number_that_is_rounded_otherwise_is_alike():
    """Kernels of two kinds of device may round a norm by which a step divides."""
    same, rank = SameSteps(), dist.get_rank()
    same.begin(shared=True)
    with same.one_step():
        counted_calls.get().note(torch.mul, (3.0 + 1e-7 * rank,), {})
    same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)
    with same.one_step():
        counted_calls.get().note(torch.mul, (3.0 + 1e-2 * rank,), {})
    with pytest.raises(ValueError, match="rank 1 has given"):
        same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)


def test_what_is_written_is_not_read():
    """Memory that `out` or an operation in place fills has no values before it."""
    calls, filled = Calls(), torch.ones(3)
    calls.reads_numbers = True
    for value in (1.0, 2.0):
        filled.fill_(value)
        calls.clear()
        calls.note(torch.Tensor.copy_, (filled,), {})
        calls.note(torch.add, (1.0, 2.0), {"out": filled})
        assert calls.sums() == {torch.Tensor.copy_: 0.0, torch.add: 4.5}


def test_values_without_memory_or_end_are_left_out():
    calls = Calls()
    calls.reads_numbers = True
    values = (float("inf"), float("nan"), torch.empty(2, device="meta"), torch.tensor(float("nan")))
    calls.note(torch.mul, (*values, torch.empty(0)), {})
    assert calls.sums() == {torch.mul: 0.0}
    calls.note(torch.mul, (2, True, 1j, -2.0), {"value": slice(1, None)})
    assert calls.sums() == {torch.mul: pytest.approx(3 + 1.5 + 1.25 + 1 + 1.5)}
