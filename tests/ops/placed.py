"""Ways in which a tensor comes to be split: not only by `shard`, but as a result of functions.

Its part of a rank then lies in memory or over the ranks as `shard` would not lay it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard

Way = Callable[[Tensor, DeviceMesh, int], Tensor]


def of_factors(inner_split: bool) -> Way:
    """Two dims that were flattened, of which one is split: the rows of a rank may lie apart."""

    def place(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        n = x.shape[dim]
        if n == 0:
            return lightning_shard.shard(x, mesh, dim)
        first = next((k for k in range(2, n) if n % k == 0), n)
        pairs = x.unflatten(dim, (first, n // first))
        return lightning_shard.shard(pairs, mesh, dim + inner_split).flatten(dim, dim + 1)

    return place


def turned(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    last = x.transpose(dim, -1).contiguous()
    return lightning_shard.shard(last, mesh, x.ndim - 1).transpose(dim, -1)


def sliced(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    longer = torch.cat([x, x, x], dim)
    return lightning_shard.shard(longer, mesh, dim).narrow(dim, x.shape[dim], x.shape[dim])


def stepped(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    twice = torch.stack([x, x], dim + 1).flatten(dim, dim + 1)
    index = tuple(slice(None, None, 2 if d == dim else 1) for d in range(x.ndim))
    return lightning_shard.shard(twice, mesh, dim)[index]


def chosen(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return lightning_shard.shard(torch.stack([x, x]), mesh, dim + 1)[1]


def flipped(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    return lightning_shard.shard(x.flip(dim), mesh, dim).flip(dim)


WAYS: dict[str, Way] = {
    "sharded": lightning_shard.shard,
    "outer of two dims": of_factors(inner_split=False),
    "inner of two dims": of_factors(inner_split=True),
    "turned": turned,
    "sliced": sliced,
    "stepped": stepped,
    "chosen": chosen,
    "flipped": flipped,
}
