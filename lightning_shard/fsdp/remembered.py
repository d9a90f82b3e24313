"""Gives those who remember a parameter from before sharding the one that replaces it.

FSDP2 replaces each parameter of a module by a new object. A program may have kept the old one: in
a list, in an average of the weights, in a loss, in an optimizer, in a closure. Nobody would train
it any more, so what the program computes from it would be wrong without a word. Here every holder
that the garbage collector knows gets the new parameter in the place of the old one.
"""

import contextlib
import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any

from torch import nn

from lightning_shard.processes.narrow import is_dict

# what passes: a running function's own variables cannot be changed from outside
_PASSING = (FrameType, GeneratorType, CoroutineType, TracebackType)
_DEPTH = 8  # of tuples in tuples


class Remembered:
    """Places outside of modules at which parameters of one module are held.

    They hold shards. `show` puts others there for a while, as the whole parameters of a step.
    """

    def __init__(self) -> None:
        """Know of no place."""
        self._places: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        self._shown: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = []

    def add(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Follow a place: a parameter, or a tuple or frozenset with parameters in it."""
        self._places.append((read, write, read()))

    def show(self, wholes: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put the whole parameter of each shard into the places that still hold the shard."""
        if not wholes:
            return
        for read, write, held in self._places:
            shown = _exchanged(held, wholes)
            if shown is not held and _still(read) is held:
                write(shown)
                self._shown.append((read, write, held, shown))

    def hide(self) -> None:
        """Put the shards back."""
        for read, write, held, shown in self._shown:
            if _still(read) is shown:
                write(held)
        self._shown.clear()


def _still(read: Callable[[], Any]) -> Any:
    """Read a place; None if the program has removed it."""
    try:
        return read()
    except (LookupError, AttributeError, ValueError):
        return None


def _exchanged(value: Any, new: Mapping[Any, Any]) -> Any:
    """Return `value`, or what it becomes if the objects in it are replaced by those in `new`."""
    if isinstance(value, nn.Parameter):
        return new.get(value, value)
    if isinstance(value, tuple):
        items = [_exchanged(item, new) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        make: Any = getattr(type(value), "_make", type(value))  # a named tuple
        return make(items)
    if isinstance(value, frozenset):
        return frozenset(_exchanged(item, new) for item in value)
    return value


def replace_remembered(
    moved: Mapping[nn.Parameter, nn.Parameter], root: nn.Module, own: Iterable[Any] = ()
) -> Remembered:
    """Put the new parameter into every place that holds an old one.

    Args:
        moved: The new parameter of each old one.
        root: The module, named in the error.
        own: Containers of ours that must keep the old ones.

    Returns:
        The places.

    Raises:
        RuntimeError: An old parameter is held by an object that cannot be changed.
    """
    new = {old: p for old, p in moved.items() if old is not p}
    remembered = Remembered()
    if new:
        with nothing_frozen():
            _replace(new, root, {id(moved), id(new), *map(id, own)}, remembered, _DEPTH)
    return remembered


@contextlib.contextmanager
def nothing_frozen() -> Iterator[None]:
    """Let the collector look at what a program hid from it by `gc.freeze()`."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _replace(
    new: Mapping[Any, Any], root: nn.Module, skipped: set[int], found: Remembered, depth: int
) -> None:
    """Replace each key of `new`, a parameter or a tuple with some, by its value everywhere."""
    olds = list(new)
    ids = {id(old): value for old, value in new.items()}
    holders = gc.get_referrers(*olds)
    ignored = {*skipped, id(olds), id(ids), id(holders), id(new)}
    inner: dict[Any, Any] = {}
    for holder in holders:
        if id(holder) in ignored or isinstance(holder, _PASSING):
            continue
        if isinstance(holder, tuple | frozenset):
            inner[_ById(holder)] = _rebuilt(holder, ids)
        elif not _replace_in(holder, ids, found):
            raise RuntimeError(
                f"{_named(holder)} has kept a parameter of {type(root).__name__} since before it "
                "was sharded, so it would go on with old values; let it read the parameters of "
                "the module when it needs them, or make it in configure_optimizers or a hook."
            )
    del holders
    if inner and depth:
        _replace_outer(inner, root, {*ignored, id(inner)}, found, depth)


class _ById:
    """A key that stands for one object, whatever it is equal to."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _replace_outer(
    inner: dict[Any, Any], root: nn.Module, skipped: set[int], found: Remembered, depth: int
) -> None:
    """Replace tuples that hold old parameters in what holds the tuples."""
    for key, value in inner.items():
        old = key.value
        ids = {id(old): value}
        holders = gc.get_referrers(old)
        ours = {*skipped, id(holders), id(ids), id(key.__dict__), id(key)}
        for holder in holders:
            if id(holder) in ours or isinstance(holder, _PASSING):
                continue
            if isinstance(holder, tuple | frozenset):
                if depth:
                    again = {_ById(holder): _rebuilt(holder, ids)}
                    _replace_outer(again, root, {*ours, id(again)}, found, depth - 1)
            else:
                _replace_in(holder, ids, found)  # else a passing one, such as an iterator's


def _rebuilt(holder: Any, ids: Mapping[int, Any]) -> Any:
    items = [ids.get(id(item), item) for item in holder]
    return getattr(type(holder), "_make", type(holder))(items)


def _replace_in(holder: Any, ids: Mapping[int, Any], found: Remembered) -> bool:
    """Replace objects in a container, an object or a closure; False if it cannot be done."""
    if isinstance(holder, list | deque):
        follow = not _is_of_an_optimizer(holder)  # asked once: it looks at all objects
        for i, value in enumerate(holder):
            if id(value) in ids:
                holder[i] = ids[id(value)]
                if follow:
                    found.add(functools.partial(_item, holder, i), _setter(holder, i))
        return True
    if is_dict(holder):
        _replace_in_dict(holder, ids, found)
        return True
    if isinstance(holder, set):
        for value in [value for value in holder if id(value) in ids]:
            holder.discard(value)
            holder.add(ids[id(value)])
        return True
    if isinstance(holder, CellType):
        holder.cell_contents = ids[id(holder.cell_contents)]
        found.add(lambda: holder.cell_contents, functools.partial(setattr, holder, "cell_contents"))
        return True
    if isinstance(holder, functools.partial):
        args = _rebuilt(holder.args, ids)
        changed: Any = holder  # the state of a partial is settable, but not in its stub
        changed.__setstate__((holder.func, args, holder.keywords, holder.__dict__))
        return True
    return _replace_in_object(holder, ids, found)


def _replace_in_dict(holder: dict[Any, Any], ids: Mapping[int, Any], found: Remembered) -> None:
    if any(id(key) in ids for key in holder):  # such as names by parameter, in the same order
        items = [(ids.get(id(key), key), value) for key, value in holder.items()]
        holder.clear()
        holder.update(items)
    for key, value in list(holder.items()):
        if id(value) in ids:
            holder[key] = ids[id(value)]
            found.add(functools.partial(_item, holder, key), _setter(holder, key))


def _replace_in_object(holder: Any, ids: Mapping[int, Any], found: Remembered) -> bool:
    """Replace the attributes of an object, in its `__dict__` or its slots."""
    done = False
    attributes = getattr(holder, "__dict__", None)
    if is_dict(attributes) and any(id(value) in ids for value in attributes.values()):
        _replace_in_dict(attributes, ids, found)
        done = True
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if id(getattr(holder, name, None)) in ids:
                object.__setattr__(holder, name, ids[id(getattr(holder, name))])
                found.add(
                    functools.partial(getattr, holder, name),
                    functools.partial(object.__setattr__, holder, name),
                )
                done = True
    return done


def _is_of_an_optimizer(holder: Any) -> bool:
    """Return True for the list of a parameter group, in which an optimizer must find shards."""
    return any(is_dict(d) and d.get("params") is holder for d in gc.get_referrers(holder))


def _item(holder: Any, key: Any) -> Any:
    return holder[key]


def _setter(holder: Any, key: Any) -> Callable[[Any], None]:
    return functools.partial(holder.__setitem__, key)


def _named(holder: Any) -> str:
    name = getattr(holder, "__qualname__", None) or getattr(holder, "__name__", None)
    kind = f"{type(holder).__module__}.{type(holder).__qualname__}"
    return f"{name} ({kind})" if name else f"an object of class {kind}"
