"""`out=` of a split tensor holds the result, or the call is refused; never is it left as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.ops import database
from tests.parity import mesh_of


def takes_out(name: str) -> bool:
    row = database._database().get(name)
    return row is not None and row.supports_out


def split_arguments(
    sample: database.Sample, chosen: tuple[int, ...], dim: int
) -> tuple[Any, dict[str, Any]]:
    numbered = iter(range(len(sample.tensors)))

    def place(t: Tensor) -> Tensor:
        return lightning_shard.shard(t, mesh_of(2), dim) if next(numbered) in chosen else t

    return tree_map_only(Tensor, place, (sample.args, sample.kwargs))


def written(name: str, allow_gather: bool) -> int:
    """How many of a row's calls were served with a split `out=`."""
    mesh, served = mesh_of(2), 0
    for function, sample, (chosen, dim) in database.cases_of(name, 6):
        if database.is_random(name, sample):
            continue
        try:
            expected = function(*sample.args, **sample.kwargs)
            many = isinstance(expected, tuple)
            wholes = [torch.full_like(t, 3) for t in (expected if many else [expected])]
            function(*sample.args, **sample.kwargs, out=tuple(wholes) if many else wholes[0])
        except Exception:
            continue
        given = expected if many else [expected]
        if not all(map(torch.equal, wholes, given)):  # Tensor.__pow__ pays no attention to out=
            continue
        if any(not isinstance(t, Tensor) or not t.ndim for t in wholes):
            continue
        outs = [
            lightning_shard.shard(torch.full_like(t, 3), mesh, min(dim, t.ndim - 1)) for t in wholes
        ]
        args, kwargs = split_arguments(sample, chosen, dim)
        try:
            if allow_gather:
                with lightning_shard.allow_gather():
                    function(*args, **kwargs, out=tuple(outs) if many else outs[0])
            else:
                function(*args, **kwargs, out=tuple(outs) if many else outs[0])
        except UnsupportedOperationError:
            for out in outs:
                whole = lightning_shard.gather(out)
                assert torch.equal(whole, torch.full_like(whole, 3)), name
            continue
        served += 1
        for out, whole in zip(outs, wholes, strict=True):
            found = lightning_shard.gather(out)
            told = f"{name}({sample}), {chosen} split along {dim}"
            torch.testing.assert_close(
                found, whole, equal_nan=True, msg=lambda m, told=told: f"{told}: {m}"
            )
    return served


@pytest.mark.quick_rows("11")
@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", range(12))
def test_every_function_with_out(share):
    served = {n: written(n, False) for n in list(filter(takes_out, database.names()))[share::12]}
    assert sum(map(bool, served.values())) > len(served) / 2, served


@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore")
def test_where_gathering_is_allowed():
    for name in ("maximum", "minimum", "mul", "sum", "linalg.inv", "sort", "lerp", "kron"):
        if takes_out(name):
            written(name, True)


@pytest.mark.spmd(3)
def test_the_window_of_a_dilation():
    """As kornia writes it: the same tensor is an operand and takes the result."""
    x = torch.randn(2, 7, 5)
    split = lightning_shard.shard(x.clone(), mesh_of(3), 1)
    best, found = torch.full_like(x, -9.0), torch.full_like(split, -9.0)
    for shift in range(3):
        torch.maximum(best, x.roll(shift, 1), out=best)
        assert torch.maximum(found, split.roll(shift, 1), out=found) is found
    torch.testing.assert_close(lightning_shard.gather(found), best)


@pytest.mark.spmd(3)
def test_only_out_is_split():
    x, split = torch.randn(2, 7), lightning_shard.shard(torch.zeros(2, 7), mesh_of(3), 1)
    for function in (
        lambda out: torch.mul(x, 2, out=out),
        lambda out: torch.matmul(x, x.T @ x, out=out),
    ):
        assert function(split) is split
        torch.testing.assert_close(lightning_shard.gather(split), function(None))


@pytest.mark.spmd(3)
def test_refusals():
    split = lightning_shard.shard(torch.randn(2, 7), mesh_of(3), 1)
    with pytest.raises(UnsupportedOperationError, match="must have the shape and the dtype"):
        torch.add(split, 1, out=torch.zeros_like(split, dtype=torch.float64))
    with pytest.raises(UnsupportedOperationError, match="plain tensor and the result is split"):
        torch.add(split, 1, out=torch.zeros(2, 7))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.add(split.requires_grad_(), 1, out=torch.zeros_like(split))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(split.detach(), 0.5, out=torch.zeros_like(split, dtype=torch.int64))
