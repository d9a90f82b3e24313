"""Lets replicas repeat samples in evaluations, as Lightning does."""

from lightning_shard.lightning import Callback, Trainer
from lightning_shard.trainer.host import callbacks_of


class RepeatSamples(Callback):
    """Lets data replicas that have fewer samples to evaluate than others read some again.

    All ranks then run the same number of steps, as with Lightning's sampler, and metrics count the
    repeated samples twice. Without this callback each sample is counted once.
    """


def repeats_samples(trainer: Trainer) -> bool:
    """Return True if the Trainer has the callback."""
    return any(isinstance(callback, RepeatSamples) for callback in callbacks_of(trainer))
