"""Reads what stands in the brackets of `x[...]`: an entry for each dim, or for a mask's dims."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain

_MASKS = (torch.bool, torch.uint8)
_SEQUENCES = (list, range, tuple, np.ndarray)
_LONGEST = 32  # from so many entries on torch takes a list for row numbers


def expanded_index(ndim: int, index: Any, *, lists: bool = False) -> list[Any]:
    """Entries for each of `ndim` dims (and None for new ones); the ellipsis written out.

    Entries are ints and slices; with `lists` also tensors of row numbers and masks, split or plain,
    to which lists, tuples inside a tuple, ranges and arrays are turned. A mask stands for as many
    dims as it has.
    """
    given = tuple(index) if _stands_for_a_tuple(index) else (index,)
    entries = _one_ellipsis([_entry(i, lists=lists) for i in given])
    missing = ndim - sum(map(covers, entries))
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    where = next((n for n, i in enumerate(entries) if i is ...), len(entries))
    return entries[:where] + [slice(None)] * missing + entries[where + 1 :]


def _stands_for_a_tuple(index: Any) -> bool:
    """Return True for a short list that torch reads as an entry for each dim, as `[[0, 1], 2]`.

    Source: `treatSequenceAsTuple` of torch's python_variable_indexing.cpp, which has it of NumPy.
    """
    if isinstance(index, tuple):
        return True
    if not isinstance(index, list | range) or len(index) >= _LONGEST:
        return False
    parts = (*_SEQUENCES, Tensor, Subdomain, slice, type(...), type(None))
    return any(isinstance(entry, parts) for entry in index)


def _one_ellipsis(entries: list[Any]) -> list[Any]:
    """Leave out what follows a first ellipsis and names no dim: torch allows further ellipses."""
    where = [n for n, entry in enumerate(entries) if entry is ...]
    if len(where) > 1 and any(covers(entry) for entry in entries[where[1] :]):
        raise IndexError("an index has two ellipses, and dims after the second one")
    return [entry for n, entry in enumerate(entries) if n not in where[1:]]


def covers(entry: Any) -> int:
    """Count the dims of the tensor for which an entry stands."""
    if entry is None or entry is ...:
        return 0
    return entry.ndim if is_mask(entry) else 1


def is_mask(entry: Any) -> bool:
    """Return True for a tensor of truth values."""
    return isinstance(entry, Tensor | Subdomain) and entry.dtype == torch.bool


def _entry(entry: Any, *, lists: bool) -> Any:
    """The entry in its simplest form."""
    if isinstance(entry, int | slice | None | type(...)) and not isinstance(entry, bool):
        return entry
    if isinstance(entry, np.integer):
        return int(entry)
    if lists and isinstance(entry, list | tuple | range | np.ndarray):
        dtype = None if len(entry) else torch.int64
        entry = torch.as_tensor(entry, dtype=dtype, device="cpu")
    if isinstance(entry, Tensor | Subdomain) and not (
        entry.dtype.is_floating_point or entry.dtype.is_complex
    ):
        if isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype not in _MASKS:
            return int(entry)
        if lists and entry.ndim and entry.dtype == torch.uint8:  # torch takes it for a mask
            return entry.like(entry.local.bool()) if isinstance(entry, Subdomain) else entry.bool()
        if lists and entry.ndim:
            return entry
    raise UnsupportedOperationError("indexing with tensors, lists or masks of this kind")
