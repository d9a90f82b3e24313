"""Tells blocks apart by what their forward reads, other than parameters and buffers.

Blocks of one kind compute the same function of their tensors, so they share what is compiled.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

# names that torch.nn.Module keeps for itself; hooks of inner modules count apart, but for those of
# their state dicts, which FSDP2 adds to each
_OWN = vars(nn.Module()).keys() - {"training"}
_HOOKS = sorted(n for n in _OWN if n.endswith("hooks") and ("forward" in n or "backward" in n))
MIXED_IN = "_mixed_in"  # attribute of a class made by tensor/mixins.py
# all that a class holds which was made to put a mixin before the class of one module
_EMPTY = {"__module__", "__doc__", "__deepcopy__", "__firstlineno__", "__static_attributes__",
          MIXED_IN}  # fmt: skip
COMPILED = "_compiled_by_lightning_shard"  # the compiled part of a module, in its __dict__
_NO_STATE = ("__composable_api", COMPILED)


class _Same:
    """An object that only equals itself; it stays alive with the key that it is in."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def kind_of(module: nn.Module) -> Hashable:
    """Return a key, equal for modules whose forwards differ in parameters and buffers alone."""
    return tuple(
        (name, _class_of(inner), *_state(inner, root=inner is module))
        for name, inner in module.named_modules()
    )


def _class_of(module: nn.Module) -> Hashable:
    return tuple(cls for cls in type(module).__mro__ if not vars(cls).keys() <= _EMPTY)


def _state(module: nn.Module, *, root: bool) -> Iterator[Hashable]:
    state = vars(module)
    for name, value in state.items():
        if name in _OWN or name.startswith(_NO_STATE) or (root and name == "forward"):
            continue
        yield name, _frozen(value)
    yield from (name for name in state["_parameters"])
    yield from (name for name in state["_buffers"])
    if not root:  # those of the block run outside
        yield from (_Same(hook) for name in _HOOKS for hook in (state[name] or {}).values())


def _frozen(value: Any) -> Hashable:
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if type(value) in (list, tuple, torch.Size):
        return type(value), *map(_frozen, value)
    if type(value) is dict:
        return dict, *((_frozen(k), _frozen(v)) for k, v in value.items())
    return _Same(value)
