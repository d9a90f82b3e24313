"""Every function that has a rule, followed by an in-place function, against one process.

What torch gives as new memory may be written: the operands keep their values, autograd agrees. What
it gives as a view passes the write on to its operand. Values of outputs and operands, and gradients
of all tensors, are compared.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.ops import database
from tests.ops.test_operators import assert_same_gradients, run
from tests.parity import assert_parity, assert_same, mesh_of


def _iadd(x: Tensor) -> None:
    x += 1


def _setitem(x: Tensor) -> None:
    x[...] = 0.5


WRITES: list[Callable[[Tensor], Any]] = [
    lambda x: F.relu(x, inplace=True),
    lambda x: x.mul_(3),
    _iadd,
    lambda x: x.clamp_(-0.5, 0.5),
    lambda x: F.dropout(x, 0.0, training=True, inplace=True),
    lambda x: x.masked_fill_(x > 0, 2.0),
    lambda x: x.copy_(x.detach().cos()),
    _setitem,
]  # fmt: skip


def check(name: str, limit: int) -> None:
    """Compare cases of a row on two ranks, each with the next of the in-place functions."""
    mesh = mesh_of(2)
    refused: list[str] = []
    for number, (function, sample, split) in enumerate(database.cases_of(name, limit)):
        if database.is_random(name, sample):
            continue
        write = WRITES[(len(name) + number) % len(WRITES)]
        call = f"{name}({sample}), {split}, write {WRITES.index(write)}"
        try:
            complaint = _compare(function, sample, split, write, mesh)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise AssertionError(f"{call}\n{error}") from error
        refused += [f"{call}: {complaint}"] if complaint else []
    assert not refused, "\n".join(refused)


def _compare(
    function: Callable[..., Any],
    sample: database.Sample,
    split: tuple[tuple[int, ...], int],
    write: Callable[[Tensor], Any],
    mesh: DeviceMesh,
) -> str:
    """Compare one case.

    Returns:
        The refusal of a write into what torch gives as new memory; else nothing.
    """
    chosen, dim = split
    operands: list[Tensor] = []
    given: list[Tensor] = []

    def keep(i: int, x: Tensor) -> Tensor:
        operands.append(x)
        return x

    def place(i: int, x: Tensor) -> Tensor:
        given.append(lightning_shard.shard(x, mesh, dim) if i in chosen else x)
        return given[-1]

    try:
        expected, leaves = run(function, sample, keep)
        target = next((i for i, r in enumerate(expected) if _is_real(r)), None)
        if target is None or _repeats(expected[target]):
            return ""
        fresh = not any(_shares(expected[target], x) for x in operands)
        write(expected[target])
    except Exception:  # torch takes such arguments in another form, or forbids the write
        return ""
    try:
        results, own_leaves = run(function, sample, place)
    except UnsupportedOperationError:
        return ""
    if not isinstance(results[target], lightning_shard.DomainTensor):
        return ""
    try:
        write(results[target])
        wholes = [lightning_shard.gather(x) for x in [*results, *given] if isinstance(x, Tensor)]
    except UnsupportedOperationError as error:
        return str(error) if fresh else ""
    values = [x for x in [*expected, *operands] if isinstance(x, Tensor)]
    for found, value in zip(wholes, values, strict=True):
        assert_same(found.detach(), value.detach())
    assert_same_gradients(results, expected, own_leaves, leaves)
    return ""


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0


def _repeats(x: Tensor) -> bool:
    """Return True for an expanded tensor, of which torch forbids most writes."""
    return any(s == 0 for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)


def _shares(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@pytest.mark.slow
@database.in_groups(database.names())
def test_two_ranks(names: list[str], run_each: Callable[..., None]) -> None:
    run_each(2, check, {name: {"name": name, "limit": 8} for name in names})


def test_ranks_without_elements(run_each: Callable[..., None]) -> None:
    """Steps of a part without elements, which torch may give as 0, say nothing of shared memory."""
    names = ("nn.functional.pad.replicate_negative", "nn.functional.max_pool3d")
    run_each(2, check, {name: {"name": name, "limit": 8} for name in names})


@pytest.mark.slow
def test_one_case_of_each(run_each: Callable[..., None]) -> None:
    """Of every third row; the others, and more arguments, are slow."""
    run_each(2, check_rows, {"rows": {"names": database.names()[::3]}})


def check_rows(names: list[str]) -> None:
    for name in names:
        check(name, 1)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    y = F.group_norm(F.conv2d(x, w, padding=1), 2)
    return F.instance_norm(F.relu(y, inplace=True)).add_(1)


@pytest.mark.spmd(2)
def test_norms_before_an_activation_in_place():
    for split in (2, 3):
        assert_parity(grouped, [(2, 3, 7, 8), (4, 3, 3, 3)], {0: [split]}, mesh_of(2))
