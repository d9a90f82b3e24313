"""Keeps apart what belongs to a process, where several ranks share one.

A value of a process, such as its default process group, its random numbers or a flag of a module,
is exchanged whenever another rank goes on. So no code needs to know that ranks take turns.
"""

import copy
import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lightning_shard.processes.torch_private.internals import new_world, own_world, use_world

_VARIABLES = ("RANK", "LOCAL_RANK")
_MISSING = object()


@dataclass(frozen=True)
class _Kept:
    """An attribute of which each rank has its own: with which value it begins, where none has one.

    Of a cached function each rank has its own cache, which begins empty.
    """

    owner: Any
    name: str
    value: Any
    is_cache: bool = False

    def begin(self) -> Any:
        if not self.is_cache:
            return self.value
        size = self.value.cache_parameters()["maxsize"]
        return lru_cache(maxsize=size)(self.value.__wrapped__)

    def now(self) -> Any:
        return vars(self.owner).get(self.name, _MISSING)

    def use(self, value: Any) -> None:
        if value is not _MISSING:
            setattr(self.owner, self.name, value)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


_kept: list[_Kept] = []  # it only grows, also while ranks run, which import more modules


def per_rank(owner: Any, *names: str) -> None:
    """Let each simulated rank have its own value of these attributes of a module or an object.

    Code must read them there each time, for another rank's value is another object.
    """
    _kept.extend(_Kept(owner, name, vars(owner).get(name, _MISSING)) for name in names)


def cached_per_rank(module: str, *names: str) -> None:
    """Let each simulated rank have its own cache of these functions, which have an `lru_cache`."""
    owner = sys.modules[module]
    _kept.extend(_Kept(owner, name, vars(owner)[name], is_cache=True) for name in names)


per_rank(warnings, "filters", "showwarning", "_showwarnmsg_impl")


class State:
    """What a rank would have in a process of its own; taken now from the one that runs."""

    def __init__(self) -> None:
        self._world = own_world()
        self._random = random.getstate()
        self._torch = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._numpy = None if "numpy" not in sys.modules else _numpy().get_state()
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        self._values = [kept.now() for kept in _kept]

    def as_rank(self, variables: Mapping[str, str | None]) -> "State":
        """The state in which a rank begins: that of a fork, in no process group."""
        self._world = new_world()
        self._variables = dict(variables)
        pairs = zip(_kept, self._values, strict=True)
        self._values = [kept.begin() if kept.is_cache else _own(value) for kept, value in pairs]
        return self

    def use(self) -> None:
        """Go on with it."""
        use_world(self._world)
        random.setstate(self._random)
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(self._dtype)
        if self._numpy is not None:
            _numpy().set_state(self._numpy)
        for name, value in self._variables.items():
            _set_variable(name, value)
        self._values += [kept.begin() for kept in _kept[len(self._values) :]]
        for kept, value in zip(_kept, self._values, strict=True):
            kept.use(value)
        with warnings.catch_warnings():
            pass  # which makes Python forget what it has decided by the filters of another rank


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _numpy() -> Any:
    return sys.modules["numpy"].random


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value
