"""Writes into expanded tensors, also where a rank has no rows: as in torch, or its own error.

torch refuses to write into memory that several elements share, and a rank without rows shares none.
All ranks must end alike, or those that go on wait for ever.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import mesh_of

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_dim": lambda x: x[None].expand(3, *x.shape),
    "new_dim_of_one": lambda x: x[None].expand(1, *x.shape),
    "more_dims": lambda x: x.expand(2, 2, *x.shape),
    "dim_of_one": lambda x: x[:, :1].expand(-1, 4),
    "first_row": lambda x: x[:1].expand(3, -1),
    "as_it_is": lambda x: x.expand(x.shape),
    "last_dim": lambda x: x[..., None].expand(*x.shape, 2),
    "of_none": lambda x: x[None].expand(0, *x.shape),
    "slice_of": lambda x: x[None].expand(3, *x.shape)[1:],
    "one_of": lambda x: x[None].expand(3, *x.shape)[1],
    "rows_of": lambda x: x[None].expand(3, *x.shape)[:, :1],
    "transposed": lambda x: x[None].expand(3, *x.shape).transpose(0, 1),
    "flat": lambda x: x[None].expand(1, *x.shape).flatten(0, 1),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "expand_as": lambda x: x.expand_as(torch.zeros(2, *x.shape)),
    "twice": lambda x: x[None].expand(2, *x.shape)[None].expand(2, 2, *x.shape)[0],
}  # fmt: skip


def _into_all(y: Tensor, w: Tensor) -> None:
    y[...] = 2 * w


def _into_first(y: Tensor, w: Tensor) -> None:
    y[0] = w


def _into_columns(y: Tensor, w: Tensor) -> None:
    y[..., :1] = w


def _into_one(y: Tensor, w: Tensor) -> None:
    y[(0,) * y.ndim] = w


def _added_to_first(y: Tensor, w: Tensor) -> None:
    y[0] += w


def _by_mask(y: Tensor, w: Tensor) -> None:
    y[y.detach() > 0] = 3.0


def _by_index(y: Tensor, w: Tensor) -> None:
    y[torch.tensor([0, 1])] = 3.0


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all": _into_all, "first": _into_first, "columns": _into_columns, "one": _into_one,
    "added_to_first": _added_to_first, "mask": _by_mask, "index": _by_index,
    "add_": lambda y, w: y.add_(w), "mul_": lambda y, w: y.mul_(w),
    "zero_": lambda y, w: y.zero_(), "copy_": lambda y, w: y.copy_(w),
    "relu": lambda y, w: F.relu(y, inplace=True), "fill_": lambda y, w: y.fill_(3.0),
    "clamp_": lambda y, w: y.clamp_(-0.5, 0.5), "sort": lambda y, w: y.cumsum_(0),
    "masked_fill_": lambda y, w: y.masked_fill_(y.detach() > 0, 2.0),
    "index_fill_": lambda y, w: y.index_fill_(0, torch.tensor([0]), 2.0),
    "out": lambda y, w: torch.add(y, w, out=y),
    "dropout": lambda y, w: F.dropout(y, 0.0, True, True),
    "number": lambda y, w: y.__setitem__(..., 2.0),
    "swap": lambda y, w: y.transpose_(0, 1),
}  # fmt: skip


def outcome(view: Any, write: Any, x: Tensor, kind: str) -> Any:
    """Values, gradients and second gradients of what was written, or the error."""
    leaf, w = x, torch.tensor(1.5, dtype=torch.float64)
    try:
        x = x * 2 if kind == "graph" else x
        y = view(x)
        with torch.set_grad_enabled(kind != "no grad"):
            write(y, w)
        results = [x * 1, y * 1]
        if kind == "graph":
            loss = x.square().sum() + y.pow(3).sum()
            (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
            results += [first, *torch.autograd.grad(first.pow(3).sum(), leaf)]
    except (RuntimeError, IndexError, UnsupportedOperationError) as error:
        return error
    gathered = (t if type(t) is Tensor else lightning_shard.gather(t) for t in results)
    return [t.detach() for t in gathered]


def compared(case: str, found: Any, alone: Any) -> str:
    """Word what is wrong; "" where the ranks ran as one process, or all raised an error."""
    said = f"{type(found).__name__} {found}" if isinstance(found, Exception) else ""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, said)
    if len({bool(each) for each in everywhere}) > 1:
        return f"{case}: ranks end otherwise: {[each[:150] for each in everywhere]}"
    if said:
        return ""
    if isinstance(alone, Exception):
        return f"{case}: runs, where torch says {str(alone)[:100]}"
    for number, (a, b) in enumerate(zip(found, alone, strict=True)):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-10, atol=1e-12):
            return f"{case}: result {number}: {a.flatten()[:4]} for {b.flatten()[:4]}"
    return ""


def check(shape: tuple[int, int], dims: Any, mesh_shape: tuple[int, ...], views: Any) -> None:
    mesh, wrong, served = mesh_of(*mesh_shape), [], 0
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, label, kind in itertools.product(views, WRITES, KINDS):
        found = []
        for x in (whole.clone(), lightning_shard.shard(whole.clone(), mesh, dims)):
            x.requires_grad_(kind != "plain")
            found.append(outcome(VIEWS[name], WRITES[label], x, kind))
        served += not isinstance(found[1], Exception)
        wrong.append(compared(f"{name} {label} {kind}", found[1], found[0]))
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert served > 2 * len(views)


KINDS = ("plain", "graph", "no grad", "leaf")
FEW = ("new_dim", "dim_of_one", "one_of", "rows_of")
# the number of ranks, the rows, and the views. Not yet the view "rows_of" of two rows on two ranks:
# after `y[0] += w` the ranks' collectives come in another order in a second backward pass.
CASES = [(2, 2, FEW[:3]), (3, 1, FEW), (4, 2, FEW)]
ALL = [(2, 1, tuple(VIEWS)), (3, 2, tuple(VIEWS))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("cases", [CASES, pytest.param(ALL, marks=pytest.mark.slow)])
def test_written_as_in_torch(cases: Any, run_each: Callable[..., None]) -> None:
    for ranks, rows, views in cases:
        given = {
            f"{view} of {rows} rows on {ranks} ranks": {
                "shape": (rows, 3), "dims": 0, "mesh_shape": (ranks,), "views": [view]
            }
            for view in views
        }  # fmt: skip
        run_each(ranks, check, given)
