"""Resuming inside an epoch: an ordinary DataLoader continues with the batch that comes next.

Lightning restores the batch counter but starts the loader from its first batch, unless the loader
has `state_dict` and `load_state_dict`. Samplers are deterministic per epoch, so the number of
batches that were read is the whole state: the batch sampler skips them, and no sample is loaded in
vain.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader


class SkippingBatchSampler:
    """A batch sampler whose next iteration leaves out the first `skip` batches."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
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
    sampler = SkippingBatchSampler(loader.batch_sampler)
    object.__setattr__(loader, "batch_sampler", sampler)  # DataLoader refuses a plain assignment

    def state_dict() -> dict[str, int]:
        return {"batches_read": trainer.fit_loop.epoch_loop.batch_progress.current.ready}

    def load_state_dict(state: dict[str, int]) -> None:
        read = state["batches_read"]
        sampler.skip = read if read < len(sampler) else 0  # the epoch may have been at its end
        epochs: Any = trainer.fit_loop.epoch_progress.current  # Lightning declares its base class
        _set_sampler_epoch(loader, epochs.processed)

    loader.state_dict = state_dict  # pyright: ignore[reportAttributeAccessIssue]
    loader.load_state_dict = load_state_dict  # pyright: ignore[reportAttributeAccessIssue]
