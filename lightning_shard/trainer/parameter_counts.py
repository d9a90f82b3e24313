"""The model summary counts a complex parameter once, as in plain Lightning.

Sharded, it is a real tensor of pairs (fsdp/complex_pairs.py) with twice as many elements.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager

from lightning_shard.fsdp.complex_pairs import pair_names
from lightning_shard.lightning import LightningModule, ModelSummary, Trainer
from lightning_shard.trainer.host import callbacks_of


def count_pairs_once(trainer: Trainer) -> None:
    """Let the summaries of a trainer, written as its fit starts, count complex numbers."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelSummary) and "on_fit_start" not in vars(callback):
            callback.on_fit_start = _counting_pairs_once(callback.on_fit_start)


def _counting_pairs_once(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def on_fit_start(trainer: Trainer, module: LightningModule) -> None:
        with _pairs_as_one(module):
            write(trainer, module)

    return on_fit_start


@contextmanager
def _pairs_as_one(module: LightningModule) -> Generator[None, None, None]:
    """Inside, `numel` of a pair's tensor gives the number of pairs."""
    names = pair_names(module)
    found = {p for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    for pairs in found:
        pairs.numel = functools.partial(int, pairs.numel() // 2)
    try:
        yield
    finally:
        for pairs in found:
            del pairs.numel
