"""Visits the leaves of a batch, and builds the batch again with other leaves.

Containers are mappings, sequences, dataclasses, graphs of torch_geometric, and the types that torch
has registered as trees. All else is a leaf. This is the only tree walker of the package that looks
into dataclasses and graphs, and both are known by their methods: torch_geometric is not imported.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lightning_shard.data.local import LocalPart
from lightning_shard.processes.narrow import is_mapping, is_sequence
from lightning_shard.processes.torch_private.internals import tree_flatten, tree_unflatten

Path = tuple[Any, ...]

_LEAVES = (Tensor, LocalPart, nn.Module, type, str, bytes, bytearray, memoryview, range)
_GRAPH_METHODS = ("is_node_attr", "is_edge_attr", "__cat_dim__", "keys")


def is_graph(value: Any) -> bool:
    """Return whether the value is a `Data` of torch_geometric, or a batch of them."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in _GRAPH_METHODS
    )


def entries_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds; None for a leaf.

    Returns:
        The entries of a mapping by key, those of a sequence by position, those of a dataclass by
        field, and those of a graph by name, in one order on all ranks.
    """
    if value is None or isinstance(value, _LEAVES):
        return None
    if is_mapping(value):
        return dict(value)
    if is_sequence(value):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if is_graph(value):
        return {name: value[name] for name in sorted(value.keys())}
    children = _torch_tree(value)[0]
    return None if children is None else dict(enumerate(children))


def with_entries(value: Any, entries: Mapping[Any, Any]) -> Any:
    """Return a container of the same type with other entries, by the keys of `entries_of`.

    A changed dataclass is a copy whose `__post_init__` has not run, since that may look at values.
    """
    children, tree = _torch_tree(value)
    if children is not None:
        return tree_unflatten(list(entries.values()), tree)
    if is_sequence(value):
        cls: Any = type(value)
        return cls(*entries.values()) if hasattr(cls, "_fields") else cls(entries.values())
    if is_mapping(value) and not isinstance(value, MutableMapping):
        read_only: Any = type(value)
        return read_only(dict(entries))
    changed: Any = copy.copy(value)
    if is_mapping(value):
        changed.update(entries)
    elif dataclasses.is_dataclass(value):
        for name, entry in entries.items():
            object.__setattr__(changed, name, entry)  # the dataclass may be frozen
        cls = type(value)
        for name in [n for n in vars(cls) if isinstance(vars(cls)[n], cached_property)]:
            vars(changed).pop(name, None)
    else:
        for name, entry in entries.items():
            changed[name] = entry
    return changed


def map_leaves(
    function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return `value` with `function` of each leaf in its place, visited in one order on all ranks.

    Args:
        function: Takes a leaf.
        value: A batch, or what a module takes or gives.
        is_leaf: Returns whether to take a container for a leaf.

    Returns:
        New containers. A container in which nothing has changed is given back as it is.
    """
    entries = None if is_leaf is not None and is_leaf(value) else entries_of(value)
    if entries is None:
        return function(value)
    changed = {key: map_leaves(function, entry, is_leaf) for key, entry in entries.items()}
    if all(changed[key] is entry for key, entry in entries.items()):
        return value
    return with_entries(value, changed)


def named_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf with the keys that lead to it, in the order of `map_leaves`."""
    entries = entries_of(value)
    if entries is None:
        yield path, value
        return
    for key, entry in entries.items():
        yield from named_leaves(entry, (*path, key))


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves in the order of `map_leaves`."""
    return [leaf for _, leaf in named_leaves(value)]


def _torch_tree(value: Any) -> tuple[Sequence[Any] | None, Any]:
    """Return the children of a type that torch has registered, and what builds it of others."""
    children, tree = tree_flatten(value, is_leaf=lambda x: x is not value)
    if len(children) == 1 and children[0] is value:
        return None, tree
    return children, tree
