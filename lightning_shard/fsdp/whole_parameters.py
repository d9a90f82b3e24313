"""Shows the whole parameters of a sharded module to code outside of its steps."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from torch import nn

from lightning_shard.fsdp.shard_block import SHOWS_WHOLE, sharded_modules
from lightning_shard.fsdp.step_writes import GATHERED, GatheredParameters
from lightning_shard.processes.torch_private.internals import gathers_cast


@contextmanager
def whole_parameters(module: nn.Module) -> Generator[None]:
    """Inside, every rank reads the whole parameters of a module that `parallelize` has sharded.

    The steps of a LightningModule see whole parameters anyway; this is for hooks such as
    `on_train_epoch_end`. All ranks must enter it, and write the same values if they write any.

    Raises:
        NotImplementedError: `mp_policy` has a `param_dtype`, in which FSDP2 would gather them.
    """
    sharded = sharded_modules(module)
    if any(gathers_cast(each) for each in sharded):
        raise NotImplementedError(
            "whole_parameters would show parameters in the param_dtype of mp_policy, without the "
            "digits that their shards keep: read p.full_tensor() and write p.data.copy_(value) on "
            "all ranks, or let precision='bf16-mixed' cast instead of mp_policy."
        )
    for each in sharded:
        each.reshard()
    gathered: GatheredParameters = module.__dict__.get(GATHERED) or GatheredParameters(module)
    with ExitStack() as stack:
        for each in sharded:
            stack.callback(each.reshard)
        for each in sharded:
            each.unshard()
        stack.enter_context(gathered.whole())
        stack.callback(SHOWS_WHOLE.reset, SHOWS_WHOLE.set(True))
        yield
