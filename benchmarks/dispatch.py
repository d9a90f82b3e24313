"""What a call costs beside its arithmetic: processor microseconds on tiny tensors.

    python -m benchmarks.dispatch --calls relu cat

Each function runs on plain tensors of the whole shape, on tensors of this package, and on DTensors
where these give the right values, on two ranks. A figure is the least of several rounds, which take
turns, in processor time of all threads: time in which a rank waits is not in it, but what gloo's
threads do is. With `--wall` it is wall-clock time. "No wire" leaves the collectives out. Backward
computes the gradients of all operands from this rank's rows.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lightning_shard
from benchmarks.common import describe, start, table

ROUNDS = 5
SHAPE = (2, 4, 8, 8)
# name: function, shapes of its split operands (rows, dim 2), shapes of its plain ones
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "relu": (torch.relu, [SHAPE], []),
    "add of two split": (torch.add, [SHAPE] * 2, []),
    "add of split and plain": (torch.add, [SHAPE], [SHAPE]),
    "view": (lambda x: x.view(2, 2, 2, 8, 8), [SHAPE], []),
    "cat": (lambda x, y: torch.cat([x, y], 1), [SHAPE] * 2, []),
    "linear": (F.linear, [SHAPE], [(8, 8), (8,)]),
    "conv3x3": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [SHAPE], [(4, 4, 3, 3), (4,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [SHAPE], [(4,)] * 2),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [SHAPE], [(4,)] * 2),
    "var_mean": (lambda x: torch.var_mean(x, (2, 3)), [SHAPE], []),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [SHAPE], [(8,)] * 2),
    "layer norm of rows": (lambda x, w, b: F.layer_norm(x, (8, 8), w, b), [SHAPE], [(8, 8)] * 2),
}  # fmt: skip
WITHOUT_WIRE = ("conv3x3", "group norm", "batch norm", "var_mean", "layer norm of rows")
Operands = list[Tensor]


def costs(names: list[str], wall: bool, count: int) -> list[list[Any]]:
    """A row for each function and direction."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    clock = time.perf_counter if wall else time.process_time
    rows = []
    for backward in (False, True):
        for name in names:
            sides = {"plain": (operands(name, plain, mesh), False)}
            sides["ours"] = (operands(name, split, mesh), False)
            if name in WITHOUT_WIRE:
                sides["no wire"] = (sides["ours"][0], True)
            if _is_right(name, mesh):
                sides["DTensor"] = (operands(name, distributed, mesh), False)
            least = dict.fromkeys(sides, float("inf"))
            for _ in range(ROUNDS):
                for side, (given, cut) in sides.items():
                    with _no_wire() if cut else contextlib.nullcontext():
                        cost = _round(CALLS[name][0], given, backward, clock, count)
                    least[side] = min(least[side], cost)
            rows.append([name, "forward, backward" if backward else "forward", *_figures(least)])
    return rows


def _figures(least: dict[str, float]) -> list[str]:
    def figure(side: str) -> str:
        return f"{least[side]:.0f}" if side in least else ""

    over = least.get("no wire", least["ours"]) - least["plain"]
    ratio = least["ours"] / least["plain"]
    return [figure("plain"), figure("ours"), figure("no wire"), f"{over:.0f}", f"{ratio:.1f}",
            figure("DTensor")]  # fmt: skip


def _round(
    function: Callable[..., Any],
    given: Operands,
    backward: bool,
    clock: Callable[[], float],
    count: int,
) -> float:
    """Microseconds of one call."""
    given = [t.requires_grad_(backward) for t in given]
    leaves = [t.to_local() if isinstance(t, lightning_shard.DomainTensor) else t for t in given]
    step = (lambda: _both(function, given, leaves)) if backward else (lambda: function(*given))
    for _ in range(count // 10):
        step()
    dist.barrier()
    begin = clock()
    for _ in range(count):
        step()
    spent = clock() - begin
    dist.barrier()
    return spent / count * 1e6


def _both(function: Callable[..., Any], given: Operands, leaves: Operands) -> None:
    outputs = function(*given)
    rows = [_local(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]
    torch.autograd.grad(rows, leaves, [y.detach() for y in rows])


def _local(y: Any) -> Tensor:
    return y.to_local() if isinstance(y, DTensor | lightning_shard.DomainTensor) else y


def operands(name: str, make: Callable[..., Tensor], mesh: DeviceMesh) -> Operands:
    """The operands of a function, as `make` makes them of tensors that all ranks hold whole."""
    torch.manual_seed(0)
    _, shapes, others = CALLS[name]
    made = [make(torch.randn(shape), mesh, True) for shape in shapes]
    return [*made, *(make(torch.randn(shape), mesh, False) for shape in others)]


def plain(x: Tensor, mesh: DeviceMesh, is_split: bool) -> Tensor:
    """The whole tensor: it is so small that its arithmetic costs little."""
    return x


def split(x: Tensor, mesh: DeviceMesh, is_split: bool) -> Tensor:
    """This package's tensor; what is not split stays plain."""
    if not is_split:
        return x
    local = lightning_shard.shard(x, mesh, 2).to_local().clone()
    return lightning_shard.from_local(local, mesh, 2, x.shape)


def distributed(x: Tensor, mesh: DeviceMesh, is_split: bool) -> Tensor:
    """A DTensor."""
    return distribute_tensor(x, mesh, [Shard(2) if is_split else Replicate()])


def _is_right(name: str, mesh: DeviceMesh) -> bool:
    """Whether DTensor knows the function, and gives the values of one process."""
    function = CALLS[name][0]
    try:
        found = function(*operands(name, distributed, mesh))
        found = [y.full_tensor() for y in (found if isinstance(found, tuple) else (found,))]
    except Exception:  # of any kind: it does not know the function
        return False
    whole = function(*operands(name, plain, mesh))
    expected = whole if isinstance(whole, tuple) else (whole,)
    return all(
        f.shape == e.shape and torch.allclose(f, e, atol=1e-5)
        for f, e in zip(found, expected, strict=True)
    )


@contextlib.contextmanager
def _no_wire() -> Any:
    """Collectives send nothing, and what they should fill is zero."""

    def zeros(filled: Tensor, *args: Any, **kwargs: Any) -> None:
        filled.zero_()  # what memory held before may be numbers that are slow to compute with

    with (
        mock.patch.object(dist, "all_to_all_single", zeros),
        mock.patch.object(dist, "all_reduce", zeros),
    ):
        yield


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--count", type=int, default=100, help="calls of a round")
    options = parser.parse_args()
    rows = start(2, costs, options.calls, options.wall, options.count)
    describe()
    head = ["function", "", "plain", "ours", "no wire", "over plain", "ours / plain", "DTensor"]
    print(f"{'wall' if options.wall else 'processor'} us for a call, {SHAPE} over 2 ranks")
    table(head, rows)


if __name__ == "__main__":
    main()
