"""Resuming inside an epoch: an ordinary DataLoader continues with the batch that comes next.

Lightning restores the batch counter but starts the loader from its first batch, unless the loader
has `state_dict` and `load_state_dict`. Samplers are deterministic per epoch, so the counter is the
whole state: the batch sampler skips what was read, and no sample is loaded in vain. Nothing is
added to the checkpoint, so that Lightning resumes ours, and we resume Lightning's.

Workers are seeded by the epoch from a generator of the loader's own: otherwise each pass over a
loader would draw from the default generator, and a resumed run, which makes other passes than the
uninterrupted one, would go on with other random numbers.
"""

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

_SPREAD = 0x9E3779B97F4A7C15  # odd, so epochs give different seeds modulo 2 ** 64


class SkippingBatchSampler:
    """The batch sampler of a loader that leaves out what was read before the run was resumed."""

    def __init__(self, loader: DataLoader, trainer: Trainer) -> None:
        self.inner: Any = loader.batch_sampler
        self.loader = loader
        self.seeded = torch.Generator() if loader.generator is None else None
        loader.generator = self.seeded or loader.generator
        self.begin(trainer)

    def begin(self, trainer: Trainer) -> None:
        """A trainer is about to run with the loader."""
        self.trainer = trainer
        self.seed = torch.initial_seed()
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        epochs: Any = self.trainer.fit_loop.epoch_progress.current  # Lightning: its base class
        if self.seeded is not None:  # DataLoader seeds its workers after this
            self.seeded.manual_seed((self.seed + epochs.processed * _SPREAD) % 2**63)
        self.passes += 1
        read = self._batches_read() if self.passes == 1 else 0
        if read:
            _set_sampler_epoch(self.loader, epochs.processed)
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        return islice(self.inner, read, None)

    def _batches_read(self) -> int:
        loop = self.trainer.fit_loop
        if not self.trainer.training or not loop.restarting:
            return 0
        read = loop.epoch_loop.batch_progress.current.ready
        return read if read < len(self) else 0  # the epoch may have been at its end

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def make_resumable(loader: DataLoader, trainer: Trainer) -> None:
    """Let `loader` skip what was read, in place, unless it does so itself or has no sampler."""
    if hasattr(loader, "state_dict") or loader.batch_sampler is None:
        return
    if isinstance(loader.batch_sampler, SkippingBatchSampler):
        loader.batch_sampler.begin(trainer)
        return
    sampler = SkippingBatchSampler(loader, trainer)
    object.__setattr__(loader, "batch_sampler", sampler)  # DataLoader refuses a plain assignment
