"""Shows the whole parameters of a sharded module to code outside of its steps."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from torch import nn

from lightning_shard.fsdp.shard_block import sharded_modules
from lightning_shard.fsdp.step_writes import GATHERED, Gathered
from lightning_shard.processes.torch_private.internals import gathered_as_kept


@contextmanager
def whole_parameters(module: nn.Module) -> Generator[None]:
    """Inside, every rank reads the whole parameters of a module that `parallelize` has sharded.

    The steps of a LightningModule see whole parameters anyway; this is for hooks such as
    `on_train_epoch_end`. All ranks must enter it, and write the same values if they write any.
    Parameters have the precision in which they are kept, and layers compute in it, also where
    `mp_policy` lets steps compute in fewer bits.
    """
    sharded = sharded_modules(module)
    for each in sharded:
        each.reshard()
    gathered: Gathered = module.__dict__.get(GATHERED) or Gathered(module)
    with ExitStack() as stack:
        for each in sharded:
            stack.enter_context(gathered_as_kept(each))
            stack.callback(each.reshard)
        for each in sharded:
            each.unshard()
        stack.enter_context(gathered.whole())
        yield
