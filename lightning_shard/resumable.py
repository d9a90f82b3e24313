"""Resuming inside an epoch: an ordinary DataLoader continues with the batch that comes next.

Lightning restores the batch counter but starts the loader from its first batch, unless the loader
has `state_dict` and `load_state_dict`. Samplers are deterministic per epoch, so the number of
batches that were read is the whole state: the batch sampler skips them, and no sample is loaded in
vain.

Workers are seeded by the epoch from a generator of the loader's own: otherwise each pass over a
loader would draw from the default generator, and a resumed run, which makes other passes than the
uninterrupted one, would go on with other random numbers.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

_SPREAD = 0x9E3779B97F4A7C15  # odd, so epochs give different seeds modulo 2 ** 64


class SkippingBatchSampler:
    """A batch sampler whose next iteration leaves out the first `skip` batches.

    `on_pass` is called as each pass over the loader begins, before its workers are seeded.
    """

    def __init__(self, inner: Any, on_pass: Callable[[], object]) -> None:
        self.inner = inner
        self.on_pass = on_pass
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        self.on_pass()
        skip, self.skip = self.skip, 0
        return islice(self.inner, skip, None)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def make_resumable(loader: DataLoader, trainer: Trainer) -> None:
    """Give `loader` a state, in place, unless it has one or draws no batches from a sampler."""
    if hasattr(loader, "state_dict") or loader.batch_sampler is None:
        return
    own = torch.Generator() if loader.generator is None else None
    seed = torch.initial_seed()

    def seed_workers() -> None:
        if own is not None:
            own.manual_seed((seed + _epoch(trainer) * _SPREAD) % 2**63)

    loader.generator = own or loader.generator
    sampler = SkippingBatchSampler(loader.batch_sampler, seed_workers)
    object.__setattr__(loader, "batch_sampler", sampler)  # DataLoader refuses a plain assignment

    def state_dict() -> dict[str, int]:
        return {"batches_read": trainer.fit_loop.epoch_loop.batch_progress.current.ready}

    def load_state_dict(state: dict[str, int]) -> None:
        read = state["batches_read"]
        sampler.skip = read if read < len(sampler) else 0  # the epoch may have been at its end
        _set_sampler_epoch(loader, _epoch(trainer))

    loader.state_dict = state_dict  # pyright: ignore[reportAttributeAccessIssue]
    loader.load_state_dict = load_state_dict  # pyright: ignore[reportAttributeAccessIssue]


def _epoch(trainer: Trainer) -> int:
    epochs: Any = trainer.fit_loop.epoch_progress.current  # Lightning declares its base class
    return epochs.processed
