"""Finds and copies functions that hold a module in a closure, which `copy.deepcopy` does not."""

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_OF_LIGHTNING = {"log", "log_dict"}  # Lightning attaches them to callbacks in each run


def holds(value: Any, parts: set[int], seen: set[int] | None = None) -> bool:
    """Return whether a value is one of some modules or tensors, or leads to one.

    Args:
        value: Any value; containers, methods, functions and partials of functions are entered.
        parts: The ids of the modules and tensors.
        seen: The ids of what has been entered.
    """
    seen = set() if seen is None else seen
    if id(value) in parts:
        return True
    if id(value) in seen or isinstance(value, nn.Module | Tensor):
        return False
    seen.add(id(value))
    return any(holds(each, parts, seen) for each in _within(value))


def holder_in(owner: object, parts: set[int]) -> str | None:
    """Name the first attribute of an object that leads to one of these modules or tensors."""
    held: dict[str, Any] = getattr(owner, "__dict__", {})
    names = (name for name in held if name not in _OF_LIGHTNING)
    return next((name for name in names if holds(held[name], parts)), None)


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).values()


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


class Closures:
    """Gives the functions of a copied module closures over the copy.

    `copy.deepcopy` gives a copy the functions of the original, so that `lambda x: x * self.alpha`
    reads `alpha` of the original. Bound methods it copies rightly.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        """Note what has been copied.

        Args:
            memo: The copies by the ids of the originals, as `copy.deepcopy` leaves them.
        """
        self._memo = memo
        self._parts = {
            number for number, made in memo.items() if isinstance(made, nn.Module | Tensor)
        }
        self._cells: dict[int, CellType] = {}
        self._made: dict[int, Any] = {}

    def renew(self, module: nn.Module) -> None:
        """Let functions in attributes and hooks of the copy, and of its parts, see the copy."""
        for part in module.modules():
            held = vars(part)
            for name, value in [*held.items()]:
                if name == "_modules" or isinstance(value, nn.Module | Tensor):
                    continue
                if holds(value, self._parts):
                    held[name] = self._renewed(value)

    def _renewed(self, value: Any) -> Any:
        """Return a value of the copy; dicts and lists of the copy stay the same objects."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, FunctionType):
            return self._function(value) if holds(value, self._parts) else value
        if isinstance(value, MethodType):
            return copy.deepcopy(value, self._memo) if holds(value, self._parts) else value
        if isinstance(value, partial):
            args, named = map(self._renewed, value.args), value.keywords.items()
            return partial(
                self._renewed(value.func), *args, **{k: self._renewed(v) for k, v in named}
            )
        if isinstance(value, dict):
            for key, each in [*value.items()]:
                value[key] = self._renewed(each)
        elif isinstance(value, list):
            value[:] = map(self._renewed, value)
        elif type(value) is tuple:
            return tuple(map(self._renewed, value))
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells or None
        )
        self._made[id(function)] = made
        made.__dict__.update(vars(function))
        made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
        for cell, own in zip(function.__closure__ or (), cells, strict=True):
            if _is_filled(cell) and not _is_filled(own):
                own.cell_contents = self._renewed(cell.cell_contents)
        defaults = function.__defaults__
        made.__defaults__ = defaults and tuple(map(self._renewed, defaults))
        named = function.__kwdefaults__
        made.__kwdefaults__ = named and {k: self._renewed(v) for k, v in named.items()}
        return made

    def _cell(self, cell: CellType) -> CellType:
        """Return the cell that functions of the copy share, which is filled once they are there."""
        return self._cells.setdefault(id(cell), CellType())
