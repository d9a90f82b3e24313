"""Every function that has a rule, against one process, with the arguments of the table.

A case is exact (outputs, and the gradients of all tensors) or refused by name. Nothing else passes:
not a wrong number, not another error, not a rank that decides otherwise than its peers.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils._pytree import tree_map_only

import lightning_shard
from lightning_shard import UnsupportedOperationError
from lightning_shard.ops.registry import functions_with_rules, name_of, rule_for
from lightning_shard.tensor import tensor
from tests.ops import database, placed
from tests.parity import assert_same, mesh_of
from tests.pool import pool_of

# What an output in a narrow type leaves of a gradient.
NARROW = {
    torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2,
    torch.complex32: 1e-2,
}  # fmt: skip


def check_row(name: str, limit: int, ranks: int) -> None:
    """Run cases of a row, every other with tensors that came to be split in another way.

    A row of which one case runs takes one way or the other by its name.
    """
    mesh, first, others = mesh_of(ranks), zlib.crc32(name.encode()), [*placed.WAYS][1:]
    begin = first % 2 if limit == 1 else 0
    for number, (function, sample, split) in enumerate(database.cases_of(name, limit), begin):
        way = others[(first + number // 2) % len(others)] if number % 2 else "sharded"
        try:
            values = not database.is_random(name, sample)
            place = placed.WAYS[way]
            check_case(function, sample, split, mesh, values=values, shard=place)
        except (AssertionError, RuntimeError, ValueError) as error:
            tensors, dim = split
            call = f"{name_of(function)}({sample})"
            line = f"{name}: {call} with tensors {tensors} split along dim {dim}, {way}"
            raise AssertionError(f"{line}\n{error}") from error


def check_case(
    function: Callable[..., Any],
    sample: database.Sample,
    split: tuple[tuple[int, ...], int],
    mesh: DeviceMesh,
    *,
    values: bool,
    shard: placed.Way = lightning_shard.shard,
) -> bool:
    """Whether the case is exact; False if it is refused, or if torch refuses it unsplit."""
    try:
        expected, inputs = run(function, sample, lambda i, t: t)
    except Exception:  # torch takes such arguments in another form of the function
        return False
    chosen, dim = split
    try:
        results, given = run(
            function,
            sample,
            lambda i, t: shard(t, mesh, dim) if i in chosen else t,
        )
        assert len(results) == len(expected)
        for result, value in zip(results, expected, strict=True):
            assert isinstance(result, Tensor) == isinstance(value, Tensor)
            if not isinstance(value, Tensor):
                assert result == value or not values, f"{result!r}, expected {value!r}"
                continue
            assert result.shape == value.shape, f"{result.shape}, expected {value.shape}"
            assert result.dtype == value.dtype
            whole = lightning_shard.gather(result)
            if values:
                assert_same(whole.detach(), value.detach())
        if values:
            assert_same_gradients(results, expected, given, inputs)
    except UnsupportedOperationError:
        return False
    return True


def run(
    function: Callable[..., Any], sample: database.Sample, place: Callable[[int, Tensor], Tensor]
) -> tuple[list[Any], list[Tensor]]:
    """The outputs, and fresh leaves that stand for the sample's tensors."""
    leaves: list[Tensor] = []

    def fresh(x: Tensor) -> Tensor:
        leaf = x.detach().clone()
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        leaves.append(leaf)
        return place(len(leaves) - 1, leaf.clone())  # not the leaf: it may be written to

    args, kwargs = tree_map_only(Tensor, fresh, (sample.args, sample.kwargs))
    torch.manual_seed(0)
    result = function(*args, **kwargs)
    return list(result) if isinstance(result, tuple | list) else [result], leaves


def assert_same_gradients(
    results: list[Any], expected: list[Any], given: list[Tensor], inputs: list[Tensor]
) -> None:
    def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> Any:
        torch.manual_seed(3)
        loss = torch.zeros(())
        for output in outputs:
            seed = torch.randn(output.shape, dtype=output.dtype)
            loss = loss + (output * seed).sum().real
        if not loss.requires_grad:  # a norm of order 0 has no gradient but zeros
            return [None] * len(leaves)
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    used = [i for i, e in enumerate(expected) if isinstance(e, Tensor) and e.requires_grad]
    leaves = [i for i, x in enumerate(inputs) if x.requires_grad]
    if not used or not leaves or any(expected[i].isnan().any() for i in used):
        return  # nothing to compare, or a gradient through NaN
    try:
        wanted = gradients([expected[i] for i in used], [inputs[i] for i in leaves])
    except (RuntimeError, NotImplementedError):  # torch has no backward for it
        return
    wholes = [lightning_shard.gather(results[i]) for i in used]
    found = gradients(wholes, [given[i] for i in leaves])
    narrow = next((NARROW[e.dtype] for e in (expected[i] for i in used) if e.dtype in NARROW), None)
    for i, own, value in zip(leaves, found, wanted, strict=True):
        own = torch.zeros_like(inputs[i]) if own is None else own.to_dense().contiguous()
        value = torch.zeros_like(inputs[i]) if value is None else value.to_dense()
        dist.all_reduce(torch.view_as_real(own) if own.is_complex() else own)
        assert_same(own / dist.get_world_size(), value, f"gradient of tensor {i}", narrow)


def check_second_gradients(name: str, limit: int, ranks: int) -> None:
    """The gradient of a squared gradient norm, where torch has one."""
    mesh = mesh_of(ranks)
    for function, sample, split in database.cases_of(name, limit):
        chosen, dim = split
        operands: list[Tensor] = []

        def keep(i: int, x: Tensor, operands: list[Tensor] = operands) -> Tensor:
            operands.append(x)
            return x

        def place(
            i: int,
            x: Tensor,
            operands: list[Tensor] = operands,
            chosen: tuple[int, ...] = chosen,
            dim: int = dim,
        ) -> Tensor:
            return keep(i, lightning_shard.shard(x, mesh, dim) if i in chosen else x, operands)

        floating = [sample.tensors[i].is_floating_point() for i in chosen]
        if database.is_random(name, sample) or not any(floating):
            continue
        try:
            wanted = second_gradients(*run(function, sample, keep), operands)
        except Exception:  # torch refuses these arguments, or has no second derivative
            continue
        if not wanted:
            continue
        operands.clear()
        try:
            found = second_gradients(*run(function, sample, place), operands)
        except UnsupportedOperationError:
            continue
        for i, (own, value) in enumerate(zip(found, wanted, strict=True)):
            dist.all_reduce(torch.view_as_real(own) if own.is_complex() else own)
            what = f"{name}({sample}), {split}: second gradient of tensor {i}"
            assert_same(own / dist.get_world_size(), value, what, 1e-7)


def second_gradients(
    results: list[Any], leaves: list[Tensor], operands: list[Tensor]
) -> list[Tensor]:
    outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    leaves = [x for x in leaves if x.requires_grad]
    if any(o.isnan().any() for o in outputs) or not outputs:
        return []
    loss = sum((o * o).sum().real if o.is_complex() else (o * o).sum() for o in outputs)
    assert isinstance(loss, Tensor)
    inputs = [o for o in operands if o.requires_grad]
    first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    kept = [g for g in first if g is not None and g.requires_grad]
    if not kept:
        return []
    penalty = sum((g * g).sum().real if g.is_complex() else (g * g).sum() for g in kept)
    assert isinstance(penalty, Tensor)
    found = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g.contiguous()
        for g, x in zip(found, leaves, strict=True)
    ]


def over(names: Sequence[str], ranks: int, limit: int) -> dict[str, dict[str, Any]]:
    """The arguments of `check_row` or `check_second_gradients` by name of a row."""
    return {name: {"name": name, "limit": limit, "ranks": ranks} for name in names}


@pytest.mark.slow
@database.in_groups(database.names())
def test_two_ranks(names, run_each):
    """Those of three ranks, whose parts are uneven too, are in the default run."""
    run_each(2, check_row, over(names, 2, 10))


@database.in_groups(database.twice_differentiable()[::8])
def test_second_gradients(names, run_each):
    """Every eighth row; the others are slow."""
    run_each(2, check_second_gradients, over(names, 2, 1))


@pytest.mark.slow
@database.in_groups([n for i, n in enumerate(database.twice_differentiable()) if i % 8])
def test_second_gradients_of_the_other_rows(names, run_each):
    run_each(2, check_second_gradients, over(names, 2, 1))


@database.in_groups(database.names())
def test_three_ranks(names, run_each):
    """One case that `shard` has split, or that came to be split in another way."""
    run_each(3, check_row, over(names, 3, 1))


@pytest.mark.slow
@database.in_groups(database.names())
def test_more_arguments_on_three_ranks(names, run_each):
    run_each(3, check_row, over(names, 3, 6))


@pytest.mark.slow
@database.in_groups(database.names())
def test_all_arguments_on_four_ranks(names, run_each):
    run_each(4, check_row, over(names, 4, 1000))


# need a device that is not there; that of torch is tested with torch's test of the device patched;
# knn and radius are tested in tests/points, forward mode in tests/tensor/test_transforms.py,
# and is_all_true in test_distributions.py
ELSEWHERE = {
    torch._make_dual,
    torch._unpack_dual,
    torch._is_all_true,
    Tensor.cuda,
    Tensor.xpu,
    SyncBatchNorm,
    lightning_shard.knn,
    lightning_shard.radius,
}


SEEN: set[Any] = set()  # the functions of which a case was exact, in the rank that looks


def look(names: Sequence[str]) -> None:
    used: set[Any] = set()

    def recording(function: Any, *, lazy: bool = False) -> Any:
        used.add(function)
        return rule_for(function, lazy=lazy)

    for name in names:
        # as many, for a form may reach its function with some arguments only
        wanted = dict.fromkeys(database.functions_of(name), 4)
        for function, sample, split in database.cases_of(name, 200):
            used.clear()
            with mock.patch.object(tensor, "rule_for", recording):
                exact = wanted[function] and check_case(
                    function, sample, split, mesh_of(1), values=False
                )
            if exact:
                wanted[function] -= 1
                SEEN.update({*used, function})
            if not any(wanted.values()):
                break


def check_seen() -> None:
    missing = sorted(map(name_of, {*functions_with_rules()} - SEEN - ELSEWHERE))
    assert not missing, f"{len(missing)} functions have a rule and no row: {missing}"


@pytest.mark.slow
def test_every_rule_has_a_row(run_each):
    """A row counts when one of its cases ran to the end, exactly."""
    names = database.names()
    run_each(1, look, {names[i]: {"names": names[i : i + 32]} for i in range(0, len(names), 32)})
    pool_of(1).run(check_seen, {})
