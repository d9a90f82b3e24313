"""What a call costs beside its arithmetic: processor microseconds on tiny tensors.

    python -m benchmarks.dispatch --calls relu cat

Each function runs on plain tensors of the whole shape, on tensors of this package, and on DTensors
and ShardTensors where these are there and give the right values, on two ranks. A figure is the
least of several rounds, which take turns, in processor time of all threads: time in which a rank
waits is not in it, but what gloo's threads do is. With `--wall` it is wall-clock time. "No wire"
leaves the collectives out. Backward computes the gradients of all operands from this rank's rows.
"""

import argparse
import contextlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
HEAD = ("function", "", "plain", "ours", "no wire", "over plain", "ours / plain", "DTensor",
        "ShardTensor")  # fmt: skip
PEER = "physicsnemo"
Operands = list[Tensor]


def costs(names: Sequence[str], wall: bool = False, count: int = 100) -> list[list[Any]]:
    """Return a row for each function and direction; every rank calls it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    clock = time.perf_counter if wall else time.process_time
    makers = {"plain": plain, "ours": split, "DTensor": distributed}
    if importlib.util.find_spec(PEER):
        makers["ShardTensor"] = _peer
    rows = []
    for name in names:
        given = {
            side: operands(name, make, mesh)
            for side, make in makers.items()
            if side == "plain" or _is_right(name, make, mesh)
        }
        for backward in (False, True):
            least = dict.fromkeys([*given, *["no wire"] * (name in WITHOUT_WIRE)], float("inf"))
            for _ in range(ROUNDS):
                for side in least:
                    with _no_wire() if side == "no wire" else contextlib.nullcontext():
                        tensors = given["ours" if side == "no wire" else side]
                        cost = _round(CALLS[name][0], tensors, backward, clock, count)
                    least[side] = min(least[side], cost)
            rows.append([name, "forward, backward" if backward else "forward", *_figures(least)])
    return rows


def _figures(least: dict[str, float]) -> list[str]:
    def figure(side: str) -> str:
        return f"{least[side]:.0f}" if side in least else ""

    over = least.get("no wire", least["ours"]) - least["plain"]
    ratio = least["ours"] / least["plain"]
    return [figure("plain"), figure("ours"), figure("no wire"), f"{over:.0f}", f"{ratio:.1f}",
            figure("DTensor"), figure("ShardTensor")]  # fmt: skip


def _round(
    function: Callable[..., Any],
    given: Operands,
    backward: bool,
    clock: Callable[[], float],
    count: int,
) -> float:
    """Microseconds of one call."""
    given = [t.requires_grad_(backward) for t in given]
    step = (lambda: _both(function, given)) if backward else (lambda: function(*given))
    for _ in range(count // 10):
        step()
    dist.barrier()
    begin = clock()
    for _ in range(count):
        step()
    spent = clock() - begin
    dist.barrier()
    return spent / count * 1e6


def _both(function: Callable[..., Any], given: Operands) -> None:
    leaves = [t.to_local() if isinstance(t, lightning_shard.DomainTensor) else t for t in given]
    rows = [_local(y) for y in _listed(function(*given))]
    torch.autograd.grad(rows, leaves, [y.detach() for y in rows])


def _listed(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _local(y: Any) -> Tensor:
    return y.to_local() if hasattr(y, "to_local") else y


def _whole(y: Any) -> Tensor:
    if isinstance(y, lightning_shard.DomainTensor):
        return lightning_shard.gather(y)
    return y.full_tensor() if hasattr(y, "full_tensor") else y


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


def _peer(x: Tensor, mesh: DeviceMesh, is_split: bool) -> Tensor:
    """A ShardTensor; operands that are not split stay plain, and are distributed by itself."""
    from physicsnemo import domain_parallel  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        domain_parallel.register_custom_ops()  # which it does itself with CUDA
    parts = x.chunk(mesh.size(), 2) if is_split else [x] * mesh.size()
    shapes = {0: tuple(part.shape for part in parts)} if is_split else {}
    return domain_parallel.ShardTensor.from_local(
        parts[mesh.get_local_rank()].contiguous(), mesh,
        (Shard(2) if is_split else Replicate(),), sharding_shapes=shapes,
    )  # fmt: skip


def _is_right(name: str, make: Callable[..., Tensor], mesh: DeviceMesh) -> bool:
    """Whether the values are those of one process, and there are gradients; all ranks agree."""
    function = CALLS[name][0]
    try:
        found = [_whole(y) for y in _listed(function(*operands(name, make, mesh)))]
        expected = _listed(function(*operands(name, plain, mesh)))
        right = all(
            f.shape == e.shape and torch.allclose(f, e, atol=1e-5)
            for f, e in zip(found, expected, strict=True)
        )
        _both(function, [t.requires_grad_() for t in operands(name, make, mesh)])
    except Exception:  # of any kind: it does not know the function
        right = False
    agreed = torch.tensor(right)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


@contextlib.contextmanager
def _no_wire() -> Any:
    """Collectives send nothing, and what they should fill is zero."""

    def zeros(filled: Tensor, *args: Any, **kwargs: Any) -> Any:
        filled.zero_()  # what memory held before may be numbers that are slow to compute with
        return mock.Mock() if kwargs.get("async_op") else None  # no work to wait for

    names = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
    with contextlib.ExitStack() as patched:
        for name in names:
            patched.enter_context(mock.patch.object(dist, name, zeros))
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
    print(f"{'wall' if options.wall else 'processor'} us for a call, {SHAPE} over 2 ranks")
    table(HEAD, rows)


if __name__ == "__main__":
    main()
