"""Lets ranks that share a process train on batches that the first of them alone reads."""

import math
import signal
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.data.local import LocalPart
from lightning_shard.data.tree import leaves_of
from lightning_shard.lab.simulated.replicas import Replicas
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.torch_private.internals import version_of
from lightning_shard.trainer.random_state import random_state, set_random_state

_SAME = 1e-6  # relative; a smaller difference is that of sums in another order
_ZERO = 1e-12  # a loss that is so near zero has no relative difference
_CPU = torch.device("cpu")
_END = object()  # comes after the last batch
_STOP = object()  # comes in place of a batch after Ctrl-C


class BatchesOnce:
    """The batches of all loaders of a run.

    The first rank reads, with its workers. The others are given the same tensors, and go on with
    its random numbers, since a dataset may have drawn some.

    Attributes:
        ranks: The number of ranks that share this process.
        wait: Lets other ranks run until there is a batch; set once the ranks are there.
    """

    def __init__(self, ranks: int, replicas: Replicas | None = None) -> None:
        """Begin without a loader.

        Args:
            ranks: The number of ranks that share this process.
            replicas: Other processes, which end with this one after Ctrl-C; None: there are none.
        """
        self.wait: Callable[[int, Callable[[], bool], str], None]
        self._was_asked_to_stop = False
        self.ranks, self._replicas = ranks, replicas
        self._given = defaultdict[Any, deque[Any]](deque)
        self._loaders = defaultdict[int, int](int)  # by rank, counted alike on all
        self._losses = defaultdict[int, dict[int, float]](dict)  # by rank, of backwards under way
        self._backwards = defaultdict[int, int](int)  # by rank
        self._own_classes: list[tuple[Any, type]] = []  # the first rank's loaders

    @property
    def is_stopping(self) -> bool:
        """True after Ctrl-C, on all processes from the same step on."""
        return self._was_asked_to_stop if self._replicas is None else self._replicas.all_stop

    def tile(self) -> int:
        """Return the number of the rank that runs, among those of this process."""
        return dist.get_rank() % self.ranks

    def of(self, loader: Any) -> Any:
        """Return a loader, or any iterable, that the first rank alone reads."""
        rank = self.tile()
        number = self._loaders[rank]
        self._loaders[rank] += 1
        passes = 0
        if isinstance(loader, DataLoader) and (plain := getattr(loader, "read_by_all", None)):
            # given twice, as for training and for validation
            loader.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]
        kind, source = type(loader), loader

        def batches(loader: Any) -> Iterator[Any]:
            nonlocal passes
            passes += 1
            key = (number, passes)
            read = kind.__iter__ if isinstance(loader, DataLoader) else lambda _: iter(source)
            if rank == 0:
                return self._read(read(loader), key, loader)
            return self._taken(rank, key, loader)

        if isinstance(loader, DataLoader):
            if rank == 0:
                self._own_classes.append((loader, kind))
            methods = {"__iter__": batches, "read_by_all": kind}
            own: Any = type(kind.__name__, (kind,), methods)
            loader.__class__ = own
            return loader
        more = {"__len__": lambda _: len(source)} if hasattr(kind, "__len__") else {}
        return type("Once", (), {"__iter__": batches, **more})()

    def give_back(self) -> None:
        """Let loaders of the first rank be as they were."""
        for loader, kind in self._own_classes:
            loader.__class__ = kind

    def compare_loss(self, loss: float) -> None:
        """Compare a loss with that of the ranks that have come to this backward before.

        Raises:
            DisagreementError: It is another one, so the step does not do the same on all ranks.
        """
        rank = self.tile()
        number = self._backwards[rank]
        self._backwards[rank] += 1
        losses = self._losses[number]
        losses[rank] = loss
        other, known = next(iter(losses.items()))
        both_nan = math.isnan(loss) and math.isnan(known)
        if not (both_nan or math.isclose(loss, known, rel_tol=_SAME, abs_tol=_ZERO)):
            raise DisagreementError(
                f"the loss of a step is {known:.6g} on tile {other} and {loss:.6g} on tile {rank}, "
                "but all tiles compute the loss of the whole field; let no step depend on "
                "self.global_rank or on random numbers of one tile alone."
            )
        if len(losses) == self.ranks:
            del self._losses[number]

    def _read(self, batches: Iterator[Any], key: Any, loader: Any) -> Iterator[Any]:
        while True:
            try:
                batch = _STOP if self.is_stopping else next(batches, _END)
            except RuntimeError:
                if not self.is_stopping:  # else Ctrl-C has ended the workers, too
                    raise
                batch = _STOP
            if any(isinstance(leaf, LocalPart) for leaf in leaves_of(batch)):
                raise NotImplementedError(
                    "a batch holds the part of one tile, but the first tile reads for all; give "
                    "slab_of the trainer, and no mesh, so that it reads the whole field."
                )
            numbers, indices = random_state(_CPU), _indices(loader)
            for rank in range(1, self.ranks):
                self._given[rank, key].append((batch, numbers, indices))
            if batch is _STOP:
                raise KeyboardInterrupt
            if batch is _END:
                return
            yield batch

    def _taken(self, rank: int, key: Any, loader: Any) -> Iterator[Any]:
        given = self._given[rank, key]
        while True:
            self.wait(rank, lambda: bool(given), "a batch that the first rank reads")
            batch, numbers, indices = given.popleft()
            set_random_state(numbers, _CPU)
            if indices is not None:
                loader.batch_sampler.seen_batch_indices = indices
            if batch is _STOP:
                raise KeyboardInterrupt
            if batch is _END:
                del self._given[rank, key]
                return
            yield batch

    @contextmanager
    def stopping_between_steps(self) -> Generator[None]:
        """End all ranks before their next batch after Ctrl-C, while open; at once after another."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        is_over = False

        def stop(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)
            if is_over:  # Lightning has put this back after an error, as what it had found
                signal.raise_signal(signal.SIGINT)
            self._was_asked_to_stop = True
            if self._replicas is not None:
                self._replicas.wants_to_stop = True

        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            is_over = True
            signal.signal(signal.SIGINT, before)


def _indices(loader: Any) -> list[Any] | None:
    """Return the samples of the batches of a prediction, which Lightning notes as it reads."""
    return getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)


def versions(batch: Any) -> list[int]:
    """Count the writes to each tensor of a batch."""
    return [version_of(x) for x in leaves_of(batch) if isinstance(x, Tensor)]


def datasets_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the datasets of loaders, which ranks that do not read need not copy."""
    for value in values:
        if isinstance(value, DataLoader):
            yield value.dataset
        elif isinstance(value, list | tuple | dict):
            yield from datasets_in(value.values() if isinstance(value, dict) else value)
