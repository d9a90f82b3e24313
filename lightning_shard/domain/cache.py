"""Keeps constant tensors that rules need again, on their device and within a limit of bytes.

A table of cosines, the weights of an interpolation and their like are pure functions of integers, a
dtype and a device. They are made once and kept; when all of them together exceed the limit, those
used longest ago are dropped. Dropping frees nothing that is in use: a tensor that autograd has
saved lives on until its graph is gone.
"""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_shard.processes.narrow import is_list

P = ParamSpec("P")
R = TypeVar("R")

ENTRY = 1024  # bytes that a value and its arguments take beside the numbers
DEFAULT_LIMIT = 256 * 2**20  # bytes; 2048 points by 64 modes in complex64 are one of these MiB


class TensorCache:
    """Keeps the results of functions by their arguments, up to `limit` bytes.

    Attributes:
        limit: Bytes that the kept values may hold together, over all devices; each counts as its
            tensors and `ENTRY`, so that many small ones are dropped, too.
        held: Bytes that they hold now.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.limit = limit
        self.held = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()  # backward runs in threads of its own

    def __len__(self) -> int:
        return len(self._kept)

    def made_once(self, make: Callable[P, R]) -> Callable[P, R]:
        """Decorate `make`: it runs once for each list of (hashable) arguments.

        Its tensors are ordinary ones also when it is first called in `torch.inference_mode`, so
        that a constant made in validation can serve training.
        """

        @functools.wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (make, args, *sorted(kwargs.items()))
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key][0]
            with torch.inference_mode(False), torch.no_grad():
                value = make(*args, **kwargs)
            self._keep(key, value)
            return value

        return made

    def clear(self) -> None:
        """Drop everything; what is needed again is made again."""
        with self._lock:
            self._kept.clear()
            self.held = 0

    def _keep(self, key: Hashable, value: Any) -> None:
        tensors = list(_tensors_in(value))
        size = ENTRY + sum(t.untyped_storage().nbytes() for t in tensors)
        if size > self.limit or any(type(t) is not Tensor for t in tensors):  # no fake tensors
            return
        with self._lock:
            if key in self._kept:  # made by another thread meanwhile
                return
            self._kept[key] = (value, size)
            self.held += size
            while self.held > self.limit:
                _, (_, dropped) = self._kept.popitem(last=False)
                self.held -= dropped


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or those in a list or in the fields of a dataclass."""
    if isinstance(value, Tensor):
        yield value
    elif is_list(value):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors_in(tuple(vars(value).values()))


CONSTANTS = TensorCache()
made_once = CONSTANTS.made_once
clear = CONSTANTS.clear
