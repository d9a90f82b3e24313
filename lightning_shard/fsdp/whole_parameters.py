"""Shows the whole parameters of a sharded module to code outside of its steps."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from lightning_shard.fsdp.keep_step_writes import GATHERED, Gathered
from lightning_shard.fsdp.shard_block import sharded_modules


@contextmanager
def whole_parameters(module: nn.Module) -> Generator[None]:
    """Inside, every rank reads the whole parameters of a module that `parallelize` has sharded.

    The steps of a LightningModule see whole parameters anyway; this is for hooks such as
    `on_train_epoch_end`. All ranks must enter it, and write the same values if they write any.
    """
    sharded = sharded_modules(module)
    for each in sharded:
        each.reshard()
    gathered: Gathered = module.__dict__.get(GATHERED) or Gathered(module)
    for each in sharded:
        each.unshard()
    try:
        with gathered.whole():
            yield
    finally:
        for each in sharded:
            each.reshard()
