"""Resumes inside an epoch: an ordinary DataLoader continues with the batch that comes next.

Lightning restores the batch counter but starts the loader from its first batch, unless the loader
has `state_dict` and `load_state_dict`. Samplers are deterministic per epoch, so the counter is the
whole state: the batch sampler skips what was read, and no sample is loaded in vain. Nothing is
added to the checkpoint, so that Lightning resumes ours, and we resume Lightning's.

Workers are seeded by the epoch from a generator of the loader's own: otherwise each pass over a
loader would draw from the default generator, and a resumed run, which makes other passes than the
uninterrupted one, would go on with other random numbers.
"""

import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_shard.trainer.host import set_sampler_epoch

_SPREAD = 0x9E3779B97F4A7C15  # odd, so epochs give different seeds modulo 2 ** 64


class SkippingBatchSampler:
    """Samples a loader's batches, but for those that were read before the run was resumed."""

    def __init__(self, loader: DataLoader[Any], trainer: Trainer, until_end: ExitStack) -> None:
        self.inner: Any = loader.batch_sampler
        self.loader = loader
        self.seeded = torch.Generator() if loader.generator is None else None
        loader.generator = self.seeded or loader.generator
        self.begin(trainer, until_end)

    def begin(self, trainer: Trainer, until_end: ExitStack) -> None:
        """Note the trainer that is about to run with the loader, and what ends with its stage."""
        self.trainer, self.until_end = trainer, until_end
        self.seed = torch.initial_seed()
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        epochs: Any = self.trainer.fit_loop.epoch_progress.current  # Lightning: its base class
        if self.seeded is not None:  # DataLoader seeds its workers after this
            self.seeded.manual_seed((self.seed + epochs.processed * _SPREAD) % 2**63)
        self.passes += 1
        read = self._batches_read() if self.passes == 1 else 0
        if read:
            set_sampler_epoch(self.loader, epochs.processed)
            self.until_end.enter_context(_without_advice())
        return islice(self.inner, read, None)

    def _batches_read(self) -> int:
        loop = self.trainer.fit_loop
        if not self.trainer.training or not loop.restarting:
            return 0
        current: Any = loop.epoch_loop.batch_progress.current  # Lightning: its base class
        read = current.processed  # one more may have begun
        return read if read < len(self) else 0  # the epoch may have been at its end

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def unfinished_step(trainer: Trainer) -> int | None:
    """Number the training step that has begun and not ended, as on an exception."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current  # Lightning: its base class
    return progress.total.ready if current.ready > current.processed else None


@contextmanager
def _without_advice() -> Generator[None, None, None]:
    """Lightning, which sees no `state_dict` of the loader, warns that it cannot be resumed."""
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
    added = warnings.filters[0]
    try:
        yield
    finally:
        filters: Any = warnings.filters
        if added in filters:
            filters.remove(added)


def make_resumable(loader: DataLoader[Any], trainer: Trainer, until_end: ExitStack) -> None:
    """Let a loader skip what was read, in place, unless it does so itself or has no sampler.

    Args:
        loader: Of the trainer.
        trainer: Whose counters say what was read.
        until_end: Closed when the stage of the trainer ends.
    """
    if hasattr(loader, "state_dict") or loader.batch_sampler is None:
        return
    if isinstance(loader.batch_sampler, SkippingBatchSampler):
        loader.batch_sampler.begin(trainer, until_end)
        return
    sampler = SkippingBatchSampler(loader, trainer, until_end)
    object.__setattr__(loader, "batch_sampler", sampler)  # DataLoader refuses a plain assignment
