"""Ranks of one domain that give functions other numbers compute other networks: refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_shard.tensor.calls import Calls, alike, counted_calls
from lightning_shard.trainer.same_steps import SameSteps
from tests.trainer.featured import Featured, fit_sharded
from tests.trainer.test_fabric_loops import fabric_with
from tests.trainer.test_fabric_same_steps import train


def with_gradients(mode, function):
    with torch.set_grad_enabled(bool(mode)):
        return function()


CHOICES = {
    "list": lambda x, rng: [x.sin(), x.cos(), x.tanh()][rng.integers(3)] * 2,
    "samples": lambda x, rng: x.unbind(0)[rng.integers(2)] * 2,
    "halves": lambda x, rng: torch.cat(
        [x, *x.repeat(1, 2, 1, 1).chunk(2, 1)][rng.integers(2) :], 1
    ),
    "set": lambda x, rng: torch.cat([(x * 2, x * 3)[i] for i in rng.permutation(2)], 1),
    "copies": lambda x, rng: (x.sin().detach(), x.cos().detach())[rng.integers(2)] * 2 + x,
    "gradients": lambda x, rng: with_gradients(rng.integers(2), x.sin) * 2,
    "precision": lambda x, rng: x.to([torch.float32, torch.float64][rng.integers(2)]).double(),
}
MODES = ["circular", "replicate"]
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
    "padding": lambda x, rng: F.pad(x, (at := int(rng.integers(4)), 3 - at)),
    "kind of padding": lambda x, rng: F.pad(x, (1, 0, 0, 0), rng.choice(MODES)),
    "order of columns": lambda x, rng: x[..., rng.permutation(x.shape[-1])],
    "list of columns": lambda x, rng: x[..., rng.permutation(x.shape[-1]).tolist()],
    "far turn": lambda x, rng: x.roll(10**6 + int(rng.integers(6)), -1),
    "factor beside a large one": lambda x, rng: (x * 1e6) * rng.random(),
    "box": lambda x, rng: F.interpolate(x, (64, 64)) * box(int(rng.integers(60))),
}
NAMES = {
    "padding": "pad",
    "kind of padding": "pad",
    "order of columns": "__getitem__",
    "list of columns": "__getitem__",
    "far turn": "roll",
    "order of samples": "__getitem__",
    "noise": "add",
    "crop": "__getitem__",
    "turn": "roll",
    "mask": "where",
}


def box(at):
    """Ones with a few zeros, between the few values that are read of a large tensor."""
    ones = torch.ones(64, 64, dtype=torch.float64)
    ones[at : at + 3, at : at + 3] = 0.0
    return ones


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
    given = "its numbers .* in another order" if draw == "list of columns" else "other numbers"
    words = rf"rank 1 has given \S*\.{NAMES.get(draw, 'mul')} {given}.*than rank 0"
    seeds = (1, 3)  # the first numbers of every kind differ
    with pytest.raises(ValueError, match=words):
        fit_sharded(Augments(draw, seeds[dist.get_rank()]), (2,), limit_val_batches=0)


class Chooses(Augments):
    """Goes on with one of several tensors, by a generator of its own."""

    def loss(self, batch):
        x = batch["x"]
        if self.draw == "entry":
            return self((x, batch["y"])[self.rng.integers(2)]).square().mean()
        return (CHOICES[self.draw](x, self.rng) * self.weight.sum()).square().mean()


WORDS = {
    "gradients": r"Tensor.sin another split tensor.*the batch without gradients",
    "precision": "Tensor.to other numbers",
    "entry": r"torch.conv2d another split tensor.*: tensor 1 of the batch, and tensor 0",
    "halves": "torch.cat another split tensor",
    "set": "torch.cat another split tensor",
}


@pytest.mark.quick_rows("list", "set", "gradients")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("choice", [*CHOICES, "entry"])
def test_choices_of_one_rank_are_refused(choice):
    words = WORDS.get(
        choice, r"Tensor.mul another split tensor.*: .*tensor \d of call 1 of .*, and"
    )
    with pytest.raises(ValueError, match=f"rank 1 has given {words}"):
        fit_sharded(Chooses(choice, (1, 3)[dist.get_rank()]), (2,), limit_val_batches=0)
    fit_sharded(Chooses(choice, 1), (2,), limit_val_batches=0, max_epochs=2)


AUGMENTATIONS = {
    "factor": DRAWS["factor"],
    "turn": lambda x, rng: x.rot90(int(rng.integers(4)), (2, 3)),
    "flip": lambda x, rng: x.flip(-1) if rng.random() < 0.5 else x,
    "order": lambda x, rng: x[torch.from_numpy(rng.permutation(len(x)))],
    "crop": lambda x, rng: x[..., : 4 + int(rng.integers(4))],
    "erased value": lambda x, rng: x.index_fill(-1, torch.tensor(int(rng.integers(7))), 0.0),
}


class AugmentsBatches(Augments):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        turned = {"x": AUGMENTATIONS[self.draw](batch["x"], self.rng)}
        return (
            batch | turned if self.draw in ("factor", "flip", "order", "erased value") else turned
        )

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


class RoundsBatches(Featured):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        nested = torch.nested.nested_tensor([batch["x"][0], batch["x"][1, :, :3]])
        room = 1e-9 * dist.get_world_size() * self.global_rank
        return batch | {"x": batch["x"] * (1 + room), "nested": nested}


@pytest.mark.spmd(2)
def test_batches_that_a_hook_rounds_otherwise_are_served():
    fit_sharded(RoundsBatches(), (2,), limit_val_batches=0)


class Heads(Featured):
    """Several heads, in an order that is that of a set on each rank."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.heads = torch.nn.ModuleDict(
            {name: torch.nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64) for name in "uvw"}
        )

    def loss(self, batch):
        x = self(batch["x"])
        return sum(self.heads[name](self.heads[name](x)) for name in self.order).square().mean()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_another_order_on_one_rank_is_refused(sharding):
    options = {"strategy": {"sharding": sharding}, "limit_val_batches": 0}
    with pytest.raises(
        ValueError, match=r"has given \S*conv2d its numbers .* in another order.*so sort it"
    ):
        fit_sharded(Heads(("uvw", "vwu")[dist.get_rank()]), (2,), **options)
    fit_sharded(Heads("vwu"), (2,), **options)


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
    same.begin([0, 1])
    with same.one_step():
        counted_calls.get().note(torch.mul, (3.0 + 1e-7 * rank,), {})
    same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)
    with same.one_step():
        counted_calls.get().note(torch.mul, (3.0 + 1e-2 * rank,), {})
    with pytest.raises(ValueError, match="rank 1 has given"):
        same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)


def test_what_is_written_is_not_read():
    """Memory that `out` or an operation in place fills has no values before it."""
    calls, filled, product = Calls(), torch.ones(3), {torch.baddbmm: [3.0, 0]}
    calls.reads_numbers = True
    for value in (1.0, 2.0):
        filled.fill_(value)
        calls.clear()
        calls.note(torch.Tensor.copy_, (filled,), {})
        calls.note(torch.Tensor.__setitem__, (filled, 3, 4.0), {})  # kornia gives it torch.empty
        calls.note(torch.add, (1.0, 2.0), {"out": filled})
        calls.note(torch.baddbmm, (filled, 3.0), {"beta": 0})  # diffusers gives it torch.empty
        assert calls.given() == {
            torch.Tensor.copy_: [],
            torch.Tensor.__setitem__: [3, 4.0],
            torch.add: [1.0, 2.0],
            **product,
        }


def given(*args, **kwargs):
    calls = Calls()
    calls.reads_numbers = True
    calls.note(torch.mul, args, kwargs)
    return calls.given()[torch.mul]


def test_numbers_words_and_lists_are_kept_in_their_order():
    words = {"mode": "wrap", "dims": (1, [2, (3, slice(4, None))])}
    assert given(2, True, 1j, -2.5, **words) == [2, 1, 1j, -2.5, "wrap", 1, 2, 3, 4]


def freed():
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


WITHOUT_VALUES = {
    "meta": lambda: torch.empty(2, device="meta"),
    "empty": lambda: torch.empty(0),
    "freed": freed,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "bits": lambda: torch.empty(3, dtype=torch.bits8),
}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds of tensors
def test_tensors_that_do_not_add_up_are_left_out(kind):
    assert given(WITHOUT_VALUES[kind]()) == []


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "longdouble", "c8", "c16"])
def test_arrays_of_numpy_are_read_as_tensors_are(dtype):
    """The processors of two hosts may round a window otherwise, by which a step multiplies."""
    window = np.hanning(64).astype(dtype)[::-2]
    values = given(window), given(window * np.array(1 + 2**-9, dtype)), given(window * 2)
    assert given(window) == given(
        torch.from_numpy(window.astype("c16" if dtype[0] == "c" else "f8"))
    )
    assert alike(values[0], given(window * np.array(1 + 1e-6, dtype)))
    assert not any(alike(values[0], other) for other in values[1:])
    assert given(np.arange(3)) != given(np.arange(3)[::-1])


def test_what_has_no_end_is_nought():
    assert given(float("inf"), float("nan"), torch.tensor(float("nan"))) == [0.0, 0.0, 0.0]


def test_the_device_of_a_rank_is_its_own():
    calls = Calls()
    calls.reads_numbers = True
    calls.note(torch.Tensor.to, (1,), {})
    calls.note(torch.zeros_like, (), {"device": 1})
    assert calls.given() == {torch.Tensor.to: [], torch.zeros_like: []}


def test_a_tensor_that_gives_its_shape_is_not_read():
    for value in (1.0, 2.0):
        calls = Calls()
        calls.reads_numbers = True
        calls.note(torch.Tensor.expand_as, (torch.tensor(3.0), torch.full((2,), value)), {})
        calls.note(torch.Tensor.view_as, (), {"other": torch.full((2,), value)})
        assert calls.given() == {torch.Tensor.expand_as: [4.5], torch.Tensor.view_as: []}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (5,), (3, 50, 60), (2, 1, 2, 4, 400, 300)])
def test_about_so_many_values_are_read(dtype, shape):
    few, more = (found := given(torch.ones(shape).to(dtype)))[0], found[-1]
    assert isinstance(few, float if dtype in (torch.float64, torch.complex128) else int)
    places = torch.ones(shape).numel()
    assert len(found) == (2 if places > 64 else 1)
    if isinstance(few, int):  # 1 + 2 + ... + n
        assert 32 <= (2 * few) ** 0.5 <= 128 or places < 32
        assert 2**13 <= (2 * more) ** 0.5 <= 2**15 or (2 * more) ** 0.5 // 1 == places
