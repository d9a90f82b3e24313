"""Checks arguments where they enter, for which Python's error would come from deep inside."""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def check_mesh(mesh: object) -> None:
    """Refuse what is given as a mesh and is none.

    Raises:
        TypeError: It is no DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"the mesh must be a DeviceMesh, as init_mesh returns it; got {mesh!r}. find_mesh() "
            "returns None until a Trainer runs or init_mesh has been called."
        )


def check_module(module: object, function: str) -> None:
    """Refuse what is given to `function` as a module and is none, such as its class.

    Raises:
        TypeError: It is no instance of a torch.nn.Module.
    """
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else repr(module)
        raise TypeError(
            f"{function} takes a torch.nn.Module, made and not its class, as its first argument; "
            f"got {what[:200]}."
        )


def names_of(names: str | Iterable[str], argument: str) -> tuple[str, ...]:
    """Return names as a tuple; a single one may come without a list.

    Raises:
        TypeError: They are no names; the message calls them by `argument`.
    """
    given: Any = (names,) if isinstance(names, str) else names
    found = tuple[Any, ...](given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be names, as strings in a list; got {names!r}.")
    return found


def is_whole(value: object, least: int | None = 1) -> bool:
    """Return whether a value is a whole number from `least` on, of Python or of NumPy."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def check_timeout(timeout_s: Any) -> None:
    """Refuse what is no time that a wait may last.

    Raises:
        ValueError: It is no positive and finite number.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < float(timeout_s) < float("inf"):
        raise ValueError(
            f"timeout_s must be a positive and finite number of seconds, such as 1800; got "
            f"{timeout_s!r}."
        )
