"""Dataclasses as batches, and as what a block takes and gives: torch's trees do not look into them.

A changed record is a copy whose `__post_init__` has not run, since that may look at values.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lightning_shard.data.local_part import LocalPart
from lightning_shard.processes.torch_private.internals import tree_map

_NO_RECORDS = (type, Tensor, nn.Module, Mapping, list, tuple, LocalPart)


def is_record(value: Any) -> bool:
    """Say whether it is a dataclass that is no collection by itself, such as Aurora's batch."""
    return dataclasses.is_dataclass(value) and not isinstance(value, _NO_RECORDS)


def fields_of(record: Any) -> dict[str, Any]:
    """What the record holds, by the names of its fields."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def with_fields(record: Any, values: Mapping[str, Any]) -> Any:
    """A copy of the record with other values; the record itself where they are its own."""
    if all(value is getattr(record, name) for name, value in values.items()):
        return record
    changed = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # the record may be frozen
    computed = [n for n in vars(type(record)) if isinstance(vars(type(record))[n], cached_property)]
    for name in computed:
        vars(changed).pop(name, None)
    return changed


def as_dicts(value: Any) -> Any:
    """The value with each record in it as a dict of its fields."""
    return tree_map(_opened, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of all that holds nothing else, in one order; as `tree_map`, but in records, too.

    A record of which nothing has changed is given back as it is.
    """

    def change(leaf: Any) -> Any:
        if not is_record(leaf):
            return function(leaf)
        return with_fields(leaf, {n: _mapped(function, v) for n, v in fields_of(leaf).items()})

    return tree_map(change, value)


def _opened(leaf: Any) -> Any:
    if not is_record(leaf):
        return leaf
    return {name: as_dicts(value) for name, value in fields_of(leaf).items()}


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value itself if nothing in it has changed, so that its record knows."""
    changed = False

    def apply(leaf: Any) -> Any:
        nonlocal changed
        result = function(leaf)
        changed |= result is not leaf
        return result

    mapped = map_leaves(apply, value)
    return mapped if changed else value
