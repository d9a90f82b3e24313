"""Shows a pager every operator: what it reads is brought before, what it makes is known after."""

from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.memory.paging.pages import Page, Pages
from lightning_shard.processes.torch_private.internals import (
    DispatchMode,
    FakeTensor,
    key_of_storage,
    schema_of,
    without_functions,
)
from lightning_shard.tensor.tensor import DomainTensor

_aten = torch.ops.aten
# views that look at no byte, and not at the number of bytes
_UNREAD = {_aten.detach.default, _aten.alias.default, _aten.view.default}
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}
_LISTS = {list, tuple}
# batch norms write these, though their schemas do not say so
_STATISTICS = {"running_mean", "running_var"}


class _Pager(Protocol):
    """Describes the part of a pager (pager.py) to which operators are shown."""

    pages: Pages
    device: torch.device
    budget: int | None
    small: int

    def begin(self, given: list[Page], written: list[Page], key: Any) -> None: ...
    def end(self, made: list[Page], key: Any, given: list[Page]) -> None: ...
    def send_all(self) -> bool: ...
    def bring(self, *tensors: Tensor) -> None: ...
    def stay(self, *tensors: Tensor) -> None: ...


class Facts:
    """The use that an operator makes of memory.

    Attributes:
        reads: False for a view of memory that need not be there.
        makes: True if its results may be new memory.
        writes: The numbers of the arguments that it writes.
        writes_named: The names of those among them that are given by name.
        writes_any: True if it may write every argument: its schema does not say.
        can_run_again: True if it may run anew after it found no memory.
    """

    __slots__ = ("can_run_again", "makes", "reads", "writes", "writes_any", "writes_named")

    def __init__(self, operator: Any) -> None:
        """Read the operator's schema."""
        schema = schema_of(operator)
        names = [a.name for a in schema.arguments]
        written = [
            a.name in _STATISTICS or (a.alias_info is not None and a.alias_info.is_write)
            for a in schema.arguments
        ]
        self.reads = operator not in _UNREAD
        self.makes = any(a.alias_info is None for a in schema.returns)
        self.writes = tuple(n for n, is_written in enumerate(written) if is_written)
        self.writes_named = tuple(names[n] for n in self.writes)
        # torch's collectives write tensors that their schemas do not name as written
        self.writes_any = operator.namespace in ("c10d", "_c10d_functional")
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        self.can_run_again = not (self.writes or self.writes_any or draws)


@cache
def facts_of(operator: Any) -> Facts:
    """Return what an operator does with memory."""
    return Facts(operator)


_ALONE = set[Any]()  # operators of views that are not made of others


class Paging(DispatchMode):
    """While open in a thread, a pager sees the operators of this thread and of its backward."""

    def __init__(self, pager: _Pager) -> None:
        """Show operators to the pager."""
        super().__init__()
        self.pager = pager

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on storages that are near."""
        if types and not _PLAIN.issuperset(types):
            if FakeTensor in types:  # by which DTensor finds shapes: it has no memory
                return func(*args, **(kwargs or {}))
            # a DTensor and the like: this mode sees the operators on what lies in it
            return NotImplemented
        with without_functions():
            if func not in _ALONE and not facts_of(func).makes:
                # in inference mode torch shows functions that may copy, such as `to`; others may
                # have a kernel of the device, such as attention
                with self:
                    result = func.decompose(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
                _ALONE.add(func)
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = facts_of(func)
        if not facts.reads:
            return func(*args, **kwargs)
        pager = self.pager
        known, given = pager.pages.known, list[Page]()
        _find(args, known, given)
        if kwargs:
            _find(kwargs.values(), known, given)
        if not given and not facts.makes:
            return func(*args, **kwargs)
        written = given if facts.writes_any else _written(facts, args, kwargs, known)
        key = (func, *(p.count for p in given)) if pager.budget is not None else None
        pager.begin(given, written, key)
        try:
            result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not facts.can_run_again or not pager.send_all():
                raise
            result = func(*args, **kwargs)
        finally:
            for page in given:
                page.pins -= 1
        if facts.makes:
            self._note(result, args if facts.writes_any else (), key, given)
        return result

    def _note(self, result: Any, args: Any, key: Any, given: list[Page]) -> None:
        """Know what an operator has made."""
        pager = self.pager
        before = _storages(args)
        made = [
            storage
            for storage in _new_storages(result, pager)
            if key_of_storage(storage) not in before
        ]  # fmt: skip
        pager.end([pager.pages.note(storage) for storage in made], key, given)


def _find(values: Iterable[Any], known: dict[int, Page], found: list[Page]) -> None:
    """Add the pages of tensors, and of tensors in lists."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            try:
                page = known.get(key_of_storage(value.untyped_storage()))
            except NotImplementedError:  # a sparse one has no storage
                continue
            if page is not None:
                found.append(page)
        elif kind in _LISTS and value and not isinstance(value[0], int | float):
            _find(value, known, found)


def _written(facts: Facts, args: Any, kwargs: Any, known: dict[int, Page]) -> list[Page]:
    found: list[Page] = []
    for number, name in zip(facts.writes, facts.writes_named, strict=True):
        if number < len(args):
            _find((args[number],), known, found)
        elif name in kwargs:
            _find((kwargs[name],), known, found)
    return found


def _storages(args: Any) -> set[int]:
    """Return the keys of the storages of tensors, and of tensors in lists."""
    found: set[int] = set()
    for value in args:
        if isinstance(value, Tensor):
            found.add(key_of_storage(value.untyped_storage()))
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


def _new_storages(result: Any, pager: _Pager) -> list[torch.UntypedStorage]:
    """Return the storages of results on the device that are large enough and not known."""
    if type(result) in _PLAIN:
        try:
            storage = result.untyped_storage()
        except NotImplementedError:
            return []
        is_new = (
            storage.nbytes() >= pager.small
            and key_of_storage(storage) not in pager.pages.known
            and storage.device == pager.device
        )
        return [storage] if is_new else []
    if isinstance(result, list | tuple):
        found = {key_of_storage(s): s for value in result for s in _new_storages(value, pager)}
        return [*found.values()]
    return []


class Exits(TorchFunctionMode):
    """Brings a tensor whose memory is handed to something that runs no operators, and keeps it."""

    def __init__(self, pager: _Pager) -> None:
        """Bring tensors by this pager."""
        super().__init__()
        self.pager = pager

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, with the memory of its tensor in place for good if it hands that out."""
        if func not in _LOOK and func not in _HAND_OUT:
            return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], DomainTensor):  # it has no memory; its rule may gather
            with self:
                return DomainTensor.__torch_function__(func, types, args, kwargs or {})
        if func in _HAND_OUT and args:
            self.pager.stay(args[0])
        elif func in _LOOK and args:
            self.pager.bring(args[0])
        return func(*args, **(kwargs or {}))


# these look at memory without an operator
_LOOK = {Tensor.tolist, Tensor.__repr__, Tensor.__format__}
_HAND_OUT = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}
