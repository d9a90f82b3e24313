"""Rows of a field that lie whole on every tile: a plain tensor whose writes reach the field.

`x[:, 2]` of columns that are cut is a copy, where torch gives a view. Every function of it arrives
here. What it writes is assigned to the field's rows; after a write of the field they are taken
anew.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops.registry import changes_first
from lightning_shard.processes.torch_private.internals import (
    storage_key,
    version_of,
    without_rules,
)
from lightning_shard.tensor.facts import OF_WRAPPER
from lightning_shard.tensor.gathering import split_in
from lightning_shard.tiles.tile_tensor import TileTensor

_ARRAYS = {Tensor.numpy, Tensor.__array__}


class Source:
    """Tells of which field rows are a copy.

    Attributes:
        field: The field.
        index: The index that chooses the rows; None where no index does.
        rows: The rows, as the field had them.
        version: The number of writes of the field's memory until then.
        seen: The number of writes of the rows' own memory that the field has.
    """

    def __init__(self, field: TileTensor, index: Any, rows: Tensor) -> None:
        self.field, self.rows, self.index = field, rows, index
        self.version, self.seen = self.now(), version_of(rows)

    def now(self) -> tuple[int, int]:
        """Return the number of writes of the field's memory, by torch's count and by ours."""
        base = self.field if self.field.view_of is None else self.field.view_of.base
        return version_of(self.field.parts[0].local), base.changes


class TileRows(Tensor):
    """A copy of rows of a field."""

    _source: Source

    @staticmethod
    def of(rows: Tensor, source: Source) -> "TileRows":
        """Return rows, or a view of them, of this source."""
        with without_rules():
            made = rows.as_subclass(TileRows)
        made._source = source
        return made

    def __copy__(self) -> "TileRows":
        """Return another tensor of the same memory, whose writes reach the field, too."""
        with without_rules():
            alike = self.detach().requires_grad_(self.requires_grad)
        return TileRows.of(alike, self._source)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in OF_WRAPPER:
            with without_rules():
                return func(*args, **kwargs)
        found: list[TileRows] = list(split_in([args, kwargs], TileRows))
        target = args[:1] if changes_first(func, args, kwargs) else ()
        written = list(split_in([target, kwargs.get("out")], TileRows))
        for each in found:
            if version_of(each._source.rows) != each._source.seen:  # by no call, as in C++
                _write_back(each._source)
        args, kwargs = plain_rows(args), plain_rows(kwargs)
        with without_rules():
            before = [version_of(each) for each in found]
        result = func(*args, **kwargs)  # a field among the arguments has its own rules
        with without_rules():
            written = [e for e in written if e.is_inference()]  # torch counts no writes of them
            written += [e for e, v in zip(found, before, strict=True) if version_of(e) != v]
        for each in written:
            _write_back(each._source)
        if func in _ARRAYS:
            result.flags.writeable = False  # a write into it would not reach the field
        return _kept(result, found)


def _refuse_old(source: Source) -> None:
    if source.version == source.now():
        return
    with without_rules():
        has_graph = source.rows.requires_grad or source.field.requires_grad
    if source.index is not None and not has_graph:
        with torch.no_grad(), without_rules():
            rows = TileTensor.run(Tensor.__getitem__, (source.field, source.index), {})
            source.rows.copy_(rows.as_subclass(Tensor))
        source.version, source.seen = source.now(), version_of(source.rows)
    else:
        raise UnsupportedOperationError(
            "rows of several tiles are a copy, and the field that they come from was written in "
            "place since: torch would show the new values. Take the rows again after the write, "
            "or take x[index].clone() before it"
        )


def _write_back(source: Source) -> None:
    if source.index is None:
        raise UnsupportedOperationError(
            "it would write into a copy, not into the field that the rows came from; assign with "
            "x[index] = value, or write into a clone()"
        )
    source.field[source.index] = source.rows
    source.version, source.seen = source.now(), version_of(source.rows)


def plain_rows(value: Any) -> Any:
    """Return arguments with plain tensors of the same memory and graph in the place of rows."""
    if isinstance(value, TileRows):
        _refuse_old(value._source)
        with without_rules():
            return value.as_subclass(Tensor)
    if type(value) in (list, tuple):
        return type(value)(map(plain_rows, value))
    return {k: plain_rows(v) for k, v in value.items()} if type(value) is dict else value


def _kept(value: Any, found: Sequence[TileRows]) -> Any:
    """Return the result of a function with views of rows as `TileRows`."""
    if type(value) is Tensor:
        with without_rules():
            key = storage_key(value)
            row = next((row for row in found if storage_key(row) == key), None)
        return value if row is None else TileRows.of(value, row._source)
    if type(value) in (list, tuple):
        return type(value)([_kept(v, found) for v in value])
    return value
