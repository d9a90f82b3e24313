"""Rows of a split dim that every rank holds whole: a tensor whose writes are calls that we see.

`x[:, 2]` of columns that are split is a copy on all ranks, where torch gives a view. It has the
class `Rows`: memory and graph of its own, like any tensor, but every function of it arrives here.
What makes something new gives plain tensors. A view of the rows is `Rows`, too. What writes into
them is brought back to the split tensor at once (ops/view/write_back.py); all ranks call that.
"""

from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.view.write_back import (
    after_write,
    refuse_lost_write,
    refuse_stale,
    whole_rows,
)
from lightning_shard.processes.torch_private.internals import (
    FakeTensor,
    accessors,
    base_of,
    frame_callback,
    storage_key,
    untraced,
    version_of,
    without_rules,
)
from lightning_shard.tensor.facts import OF_WRAPPER
from lightning_shard.tensor.gathering import split_in

Function = Callable[..., Any]

# They read the class of a tensor, or run rules of split tensors: they are given plain tensors.
_OF_PLAIN = {
    Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__, Tensor.backward,
    torch.autograd.backward,
}  # fmt: skip
_FACTS = OF_WRAPPER | {accessors("_base").__get__}  # neither do they read values, nor give a view
_OF_NUMPY = {Tensor.numpy, Tensor.__array__}


class Rows(Tensor):
    """A copy of rows of a split tensor, equal on all ranks."""

    _part: Subdomain
    _is_part: bool

    @staticmethod
    def of(part: Subdomain, rows: Tensor | None = None) -> Tensor:
        """Return the rows of a part that no rank splits, or `rows`, a view of them.

        A fake tensor stays as it is: torch gives it no other class, and it has no values to write.
        """
        own = part.local if rows is None else rows
        if isinstance(own, FakeTensor):
            return own
        with without_rules():
            made = own.as_subclass(Rows)
            made._part, made._is_part = part, rows is not None
            if rows is None and part.copied is not None:
                part.copied.seen = version_of(part.local)
                whole_rows.add(part.copied)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling() or frame_callback() is not None:
            return _on_rows_uncompiled(func, types, args, kwargs or {})
        return on_rows(func, types, args, kwargs or {})

    def __copy__(self) -> Tensor:
        return self.view_as(self)


_ORDINARY = (Rows, Tensor, torch.nn.Parameter)


def on_rows(func: Function, types: Iterable[type], args: Sequence[Any], kwargs: Any) -> Any:
    """Run a function of which `Rows` are arguments, and bring back what it writes into them.

    Raises:
        UnsupportedOperationError: The split tensor was written after the rows were taken; or the
            write cannot be brought back.
        RuntimeError: The rows are of a leaf that requires grad, whose views torch does not write.
    """
    if func in _FACTS:
        with without_rules():
            return func(*args, **kwargs)
    found: list[Rows] = list(split_in([args, kwargs], Rows))
    for row in found:
        if _is_written_unseen(row._part):
            _write_back(row._part, with_graph=base_of(row._part.local).requires_grad)
        if row._part.copied is not None and row._part.copied.is_stale:
            refuse_stale()
    with without_rules():
        if func is Tensor.__setitem__ and _is_own(*args):
            return None
        before = [_State(row) for row in found]
    split = next((kind for kind in types if kind not in _ORDINARY), None)
    if func is torch.autograd.grad and split is not None:  # the graph knows these very tensors
        result = split.__torch_function__(func, (split,), args, kwargs)
    elif func in _OF_PLAIN or split is not None:
        result = _on_plain(func, args, kwargs)
    else:
        with without_rules():
            result = func(*args, **kwargs)
    with without_rules():
        written = {
            id(row._part.copied): (row._part, base_of(row._part.local).grad_fn is not state.node)
            for row, state in zip(found, before, strict=True)
            if state.is_written(row)
        }
    for part, with_graph in written.values():
        _write_back(part, with_graph=with_graph)
    with without_rules():
        if func in _OF_NUMPY:
            result.flags.writeable = False  # nobody would see a write into the array
        return _kept(result, found)


@untraced  # torch.compiler.disable, which would import the compiler here and now
def _on_rows_uncompiled(*call: Any) -> Any:
    return on_rows(*call)


def remember_index(call: tuple[Any, ...], result: Any) -> None:
    """Remember which `x[index]` some copied rows are; `call` is `x, index`."""
    if isinstance(result, Subdomain) and result.copied is not None:
        x, index = call
        if isinstance(x, Subdomain) and is_basic(index):
            result.copied.taken = x.local, index, result.local


def is_own_copy(x: Any, index: Any, value: Any) -> bool:
    """Return whether `x[index] = value` assigns what `x[index]` gave, as `x[index] += 1` does.

    What was added has been written back by then.
    """
    copied = value.copied if isinstance(value, Subdomain) else None
    if copied is None or copied.taken is None or not isinstance(x, Subdomain):
        return False
    source, taken, rows = copied.taken
    return source is x.local and rows is value.local and is_basic(index) and taken == index


class _State:
    """The state of rows before a function runs.

    Attributes:
        node: The last node of their graph.
    """

    def __init__(self, row: Rows) -> None:
        self._version = version_of(row)
        self._values = row.clone() if row.is_inference() else None  # nobody counts writes then
        self.node = base_of(row._part.local).grad_fn

    def is_written(self, new: Rows) -> bool:
        """Return whether the function has written into the rows."""
        old = self._values
        if old is None:
            return version_of(new) != self._version
        return not bool(((old == new) | ((old != old) & (new != new))).all())


def _is_written_unseen(part: Subdomain) -> bool:
    return part.copied is not None and version_of(part.local) != part.copied.seen


def _write_back(part: Subdomain, *, with_graph: bool) -> None:
    """Bring written rows back to the tensor that they are of; without a graph as they had none."""
    copied = part.copied
    assert copied is not None
    copied.seen = version_of(part.local)
    with torch.set_grad_enabled(with_graph):
        refuse_lost_write(part)
        after_write(part)


def _on_plain(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function with plain tensors of the same memory and graph in place of the rows."""
    given: list[tuple[Tensor, Rows]] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Rows):
            with without_rules():
                given.append((value.as_subclass(Tensor), value))
            return given[-1][0]
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        return {k: plain(v) for k, v in value.items()} if type(value) is dict else value

    result = func(*map(plain, args), **plain(kwargs))
    return next((row for tensor, row in given if result is tensor), result)


def _kept(value: Any, found: Sequence[Rows]) -> Any:
    """Return the result of a function with views of rows as `Rows`."""
    if type(value) is Tensor:
        key = storage_key(value)
        row = next((row for row in found if storage_key(row) == key), None)
        return value if row is None else Rows.of(row._part, value)
    if type(value) in (list, tuple) or type(value).__module__ == "torch.return_types":
        return type(value)([_kept(v, found) for v in value])
    return value


def _is_own(x: Any, index: Any, value: Any) -> bool:
    """Return whether `x[index] = value` assigns rows to where they were written to already."""
    if not isinstance(value, Rows) or not is_basic(index):
        return False
    if isinstance(x, Rows):
        rows = x[index]
        return (rows.data_ptr(), rows.shape, rows.stride()) == (
            value.data_ptr(), value.shape, value.stride()
        )  # fmt: skip
    part = getattr(x, "_part", None)
    return not value._is_part and is_own_copy(part, index, value._part)


_BASIC = int | slice | NoneType | EllipsisType


def is_basic(index: Any) -> bool:
    """Return whether an index has integers, slices, None and dots only, so that it gives a view."""
    return all(isinstance(i, _BASIC) for i in (index if isinstance(index, tuple) else (index,)))
