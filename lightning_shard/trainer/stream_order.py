"""Resumes streams inside an epoch: what was read of them is read again, and left out.

An `IterableDataset` has no order of indices of which a part could be skipped.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.lightning import is_overridden, rank_zero_info
from lightning_shard.trainer.ordered_batches import Order


class StreamOrder(Order):
    """Begins the passes over a stream; a resumed one reads again what was read, and leaves it out.

    A stream is not read again if the data module has a state, which may hold its place.
    """

    @override
    def put_into_loader(self, until_end: ExitStack) -> None:
        """Let the loader begin its passes here, in place; `put_into` gives back its class."""
        cls = type(self.loader)

        def begin(loader: DataLoader[Any]) -> Iterator[Any]:
            return self._begin(partial(cls.__iter__, loader))

        self.loader.__class__ = type(cls.__name__, (cls,), {"__iter__": begin, "order": self})

    def _begin(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        read, before = self.read_in_pass(), self.numbers()
        self._passes += 1
        self.has_begun, self.drawn_from = True, before
        if read is None:
            return begin()
        self._set(self.resumed() or before)
        self.drawn_from = self.numbers()
        batches = begin()
        if read and self._restores_itself():
            rank_zero_info(f"{self._name} goes on where the state of the data module says.")
        elif read:
            rank_zero_info(f"{read} batches of {self._name} are read again and left out.")
            deque(islice(batches, read), maxlen=0)
        self._set(before)
        return batches

    @property
    def _name(self) -> str:
        return type(self.loader.dataset).__name__

    def _restores_itself(self) -> bool:
        source = getattr(self.trainer, "datamodule", None)
        return source is not None and is_overridden("load_state_dict", source)
