"""Checks of a type, after which a type checker takes the contents to be anything.

A checker that reads `isinstance(value, list)` complains that the type of the entries is unknown.
No function here loads torch, since the command line checks YAML with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypeIs


def is_list(value: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    """Return whether `value` is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_sequence(value: object) -> TypeIs[Sequence[Any]]:
    """Return whether `value` is a sequence; a string is one."""
    return isinstance(value, Sequence)


def is_dict(value: object) -> TypeIs[dict[Any, Any]]:
    """Return whether `value` is a dict."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeIs[Mapping[Any, Any]]:
    """Return whether `value` is a mapping, a dict among others."""
    return isinstance(value, Mapping)
