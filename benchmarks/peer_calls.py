"""The price of single calls in each package: processor microseconds on tiny tensors, two ranks.

The functions, the operands and the clock are those of `benchmarks.dispatch`; here collectives are
in every figure, since other packages' cannot be left out.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.dispatch import CALLS, ROUNDS, distributed, operands, plain, split

SIDES = ("plain", "lightning_shard", "DTensor", "ShardTensor")


def _peer(x: Tensor, mesh: DeviceMesh, is_split: bool) -> Any:
    """A ShardTensor; operands that are not split stay plain, and are distributed by itself."""
    from physicsnemo import domain_parallel  # pyright: ignore[reportMissingImports]
    from torch.distributed.tensor import Replicate, Shard

    placement = Shard(2) if is_split else Replicate()
    parts = x.chunk(mesh.size(), 2) if is_split else [x] * mesh.size()
    shapes = {0: tuple(part.shape for part in parts)} if is_split else {}
    mine = parts[mesh.get_local_rank()].contiguous()
    return domain_parallel.ShardTensor.from_local(mine, mesh, (placement,), sharding_shapes=shapes)


MAKERS: dict[str, Callable[..., Any]] = {
    "plain": plain, "lightning_shard": split, "DTensor": distributed, "ShardTensor": _peer,
}  # fmt: skip


def costs(names: Sequence[str], count: int = 50) -> list[list[str]]:
    """A row for each function; a side that fails or is wrong has no figure."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if _has_peer() and not torch.cuda.is_available():
        from physicsnemo import domain_parallel  # pyright: ignore[reportMissingImports]

        domain_parallel.register_custom_ops()
    rows: list[list[str]] = []
    for name in names:
        sides = [side for side in SIDES if side != "ShardTensor" or _has_peer()]
        given = {
            side: operands(name, MAKERS[side], mesh) for side in sides if _works(name, side, mesh)
        }
        least = dict.fromkeys(given, float("inf"))
        for _ in range(ROUNDS):
            for side, tensors in given.items():
                least[side] = min(least[side], _round(CALLS[name][0], tensors, count))
        rows.append([name, *(f"{least[side]:.0f}" if side in least else "" for side in SIDES)])
    return rows


def _has_peer() -> bool:
    import importlib.util

    return importlib.util.find_spec("physicsnemo") is not None


def _works(name: str, side: str, mesh: DeviceMesh) -> bool:
    """Whether the values are those of one process; all ranks agree on it."""
    try:
        found = _whole(CALLS[name][0](*operands(name, MAKERS[side], mesh)))
        expected = _whole(CALLS[name][0](*operands(name, plain, mesh)))
        right = all(
            f.shape == e.shape and torch.allclose(f, e, atol=1e-5)
            for f, e in zip(found, expected, strict=True)
        )
        _step(CALLS[name][0], [t.requires_grad_() for t in operands(name, MAKERS[side], mesh)])
    except Exception:  # of any kind: it does not know the function
        right = False
    agreed = torch.tensor(right)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def _whole(outputs: Any) -> list[Tensor]:
    wholes = []
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(y, lightning_shard.DomainTensor):
            wholes.append(lightning_shard.gather(y))
        else:
            wholes.append(y.full_tensor() if hasattr(y, "full_tensor") else y)
    return wholes


def _step(function: Callable[..., Any], given: list[Any]) -> None:
    outputs = function(*given)
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        local = y.to_local() if hasattr(y, "to_local") else y
        local.sum().backward(retain_graph=isinstance(outputs, tuple))


def _round(function: Callable[..., Any], given: list[Any], count: int) -> float:
    """Microseconds of a call and its backward."""
    given = [t.requires_grad_() for t in given]
    for _ in range(count // 10 + 1):
        _step(function, given)
    dist.barrier()
    begin = time.process_time()
    for _ in range(count):
        _step(function, given)
    spent = time.process_time() - begin
    dist.barrier()
    return spent / count * 1e6
