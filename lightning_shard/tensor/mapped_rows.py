"""Gives a function of parts the same rows of all its arguments, and brings back what it writes."""

from collections.abc import Sequence
from itertools import combinations

import torch

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.layout import Dim, merge
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import after_write, refuse_lost_write
from lightning_shard.processes.torch_private.internals import version_of
from lightning_shard.tensor.held_alike import device_of


def side_by_side(parts: Sequence[Subdomain]) -> list[Subdomain]:
    """Return parts of which each rank has the same rows, where the whole tensors broadcast.

    Rows of a flattened product of dims move to where those of a plain dim are.

    Raises:
        ValueError: Two of them are split along different dims, or over different ranks.
    """
    if not _are_alike(parts):
        parts = [_in_one_order(part) for part in parts]
    if not _are_alike(parts):
        shown = "; ".join(
            f"shape {part.shape}, dims {part.layout.split_dims} over mesh axes "
            f"{tuple(part.layout.axes(d) for d in part.layout.split_dims)} of ranks "
            f"{part.domain.ranks}"
            for part in parts
        )
        raise ValueError(
            "local_map: each rank must have the same rows of arguments whose shapes broadcast, but "
            f"they are split differently: {shown}. Split them alike, by "
            "lightning_shard.shard(lightning_shard.gather(y), mesh, dims); give what has one row "
            "as lightning_shard.gather(y)."
        )
    return list(parts)


def _are_alike(parts: Sequence[Subdomain]) -> bool:
    """Return whether all pairs of parts that broadcast are split alike."""
    first = parts[0]
    if all(p.domain is first.domain and p.layout == first.layout for p in parts):
        return True
    return all(_pair_is_alike(a, b, of_result=a is first) for a, b in combinations(parts, 2))


def _pair_is_alike(a: Subdomain, b: Subdomain, *, of_result: bool) -> bool:
    extents = [*zip(reversed(a.shape), reversed(b.shape), strict=False)]
    if any(m != n and 1 not in (m, n) for m, n in extents):
        return True  # they do not broadcast, so the function pairs their rows in its own way
    if a.domain is not b.domain:
        return False
    dims = zip(reversed(a.layout.dims), reversed(b.layout.dims), strict=False)
    return all(
        merge(m) == merge(n) or _is_one(n) or (_is_one(m) and not of_result)
        for m, n in dims
        if _is_split(m) or _is_split(n)
    )


def _is_split(dim: Dim) -> bool:
    return any(factor.axes for factor in dim)


def _is_one(dim: Dim) -> bool:
    """Return whether every rank has the only row of a dim."""
    return not _is_split(dim) and all(factor.extent == 1 for factor in dim)


def _in_one_order(part: Subdomain) -> Subdomain:
    for dim in part.layout.split_dims:
        part = one_factor(part, dim)
    return part


class WrittenSlice:
    """Brings what a function wrote into a slice to the tensor that the slice is of.

    Rows of other ranks are a copy in the slice, so no write into them reaches their owners.

    Args:
        part: The part of the slice.
    """

    def __init__(self, part: Subdomain) -> None:
        self._part, self._version = part, version_of(part.local)
        # torch counts no writes in inference mode
        self._kept = part.local.clone() if part.local.is_inference() else None

    def write_back(self) -> None:
        """Write back, if the function has written on any rank; all ranks call.

        Raises:
            UnsupportedOperationError: It is not known which rows of the source they are.
            RuntimeError: The source is a leaf, as torch says it of a view of one.
        """
        domain = self._part.domain
        if domain.any_says(self._is_written, device_of(domain)):
            refuse_lost_write(self._part)
            after_write(self._part)

    def _is_written(self) -> bool:
        if self._kept is not None:
            return not torch.equal(self._kept, self._part.local)
        return self._version != version_of(self._part.local)
