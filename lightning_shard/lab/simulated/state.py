"""Keeps apart what belongs to a process, where several ranks share one.

Whenever another rank goes on, its process groups, random numbers and variables are put in place,
and the values that modules of this package name in `PROCESS_STATE`, a dict of names and of the
values that these have when the module is imported. So no other code needs to know that ranks take
turns. tests/lab/test_process_state.py finds values that change at run time and are not named.
"""

import copy
import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.processes.forking import emptied
from lightning_shard.processes.torch_private.internals import new_world, own_world, use_world
from lightning_shard.trainer.profile.traffic import SENT

_VARIABLES = ("RANK", "LOCAL_RANK")
_MISSING = object()
_OURS = "lightning_shard."

# state of a process in other packages: a module, an object in it ("" for the module), attributes
_OF_OTHERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("warnings", ""): ("filters", "showwarning", "_showwarnmsg_impl"),
    ("torch.distributed", ""): tuple(SENT),  # replaced where bytes are counted
    # Lightning's decorators take the rank from an attribute
    ("lightning.fabric.utilities.rank_zero", "rank_zero_only"): ("rank",),
    ("lightning_utilities.core.rank_zero", "rank_zero_only"): ("rank",),
}


@dataclass(frozen=True)
class _Attribute:
    """An attribute of which each rank has its own value, and its value in a new process."""

    owner: Any
    name: str
    first: Any

    def new(self) -> Any:
        """Return the value in a process that imports the module now."""
        is_container = isinstance(self.first, list | dict | set)
        return type(self.first)() if is_container else self.forked(self.first)

    def forked(self, value: Any) -> Any:
        """Return the value in a fork of a process that has `value`; a cache begins empty."""
        if hasattr(self.first, "cache_parameters"):
            return emptied(self.first)
        return copy.copy(value) if isinstance(value, list | dict | set) else value

    def now(self) -> Any:
        """Return the value of the rank that runs."""
        return vars(self.owner).get(self.name, _MISSING)

    def use(self, value: Any) -> None:
        """Let the rank that goes on have its value."""
        if value is not _MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


_attributes: list[_Attribute] = []  # it only grows: ranks import more modules while they run
_looked_at: set[str] = set()  # names of modules
_count = 0  # the number of modules, when they were looked at


def _all_attributes() -> list[_Attribute]:
    """Return the attributes of which each rank has its own, in the order in which they came."""
    global _count
    if len(sys.modules) != _count:
        _count = len(sys.modules)
        for name in sys.modules.keys() - _looked_at:
            _looked_at.add(name)
            if name.startswith(_OURS):
                module = sys.modules[name]
                state: dict[str, Any] = vars(module).get("PROCESS_STATE", {})
                _attributes.extend(_Attribute(module, key, state[key]) for key in state)
        for (name, part), keys in _OF_OTHERS.items():
            if name in sys.modules:
                owner = getattr(sys.modules[name], part) if part else sys.modules[name]
                known = [a for a in _attributes if a.owner is owner]
                if not known:
                    found = vars(owner)
                    _attributes.extend(_Attribute(owner, k, found.get(k, _MISSING)) for k in keys)
    return _attributes


class State:
    """The state of a process, taken from the rank that runs."""

    def __init__(self) -> None:
        self._world = own_world()
        self._random = random.getstate()
        self._torch = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._numpy = None if "numpy" not in sys.modules else _numpy().get_state()
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._values = [attribute.now() for attribute in _all_attributes()]

    def as_rank(self, variables: Mapping[str, str | None]) -> "State":
        """Return the state in which a rank begins: that of a fork, in no process group."""
        self._world = new_world()
        self._variables = dict(variables)
        pairs = zip(_attributes, self._values, strict=False)
        self._values = [attribute.forked(value) for attribute, value in pairs]
        return self

    def use(self) -> None:
        """Let the rank go on with it."""
        use_world(self._world)
        random.setstate(self._random)
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(self._dtype)
        if self._numpy is not None:
            _numpy().set_state(self._numpy)
        for name, value in self._variables.items():
            _set_variable(name, value)
        attributes = _all_attributes()
        self._values += [attribute.new() for attribute in attributes[len(self._values) :]]
        for attribute, value in zip(attributes, self._values, strict=True):
            attribute.use(value)
        with warnings.catch_warnings():
            pass  # Python forgets here what it has decided by the filters of another rank


def _numpy() -> Any:
    return sys.modules["numpy"].random


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value
