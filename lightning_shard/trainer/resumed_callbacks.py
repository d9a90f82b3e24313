"""Lets callbacks of a resumed run do what they did in the run that was saved.

`BackboneFinetuning` and its kin freeze as each run begins, and thaw as an epoch begins. Lightning
gives their groups back to the optimizer of a run that is resumed after that epoch, and leaves them
frozen without a word. `StochasticWeightAveraging` and `GradientAccumulationScheduler` begin with an
epoch, too, and Lightning leaves them out in one that it resumes inside.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_shard.lightning import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LightningModule,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_shard.trainer.host import callbacks_of

SHOWN = 3  # names in a sentence


def frozen_in(module: nn.Module) -> dict[str, list[str]]:
    """Name the parameters that are not trained, and the norms that do not follow their batches."""
    return {
        "parameters": [n for n, p in module.named_parameters() if not p.requires_grad],
        "norms": [n for n, m in _norms(module).items() if not m.track_running_stats],
    }


def train_as_saved(trainer: Trainer, module: LightningModule, saved: Any) -> None:
    """Freeze and thaw what a callback for fine-tuning had; warn where the module itself differs.

    Args:
        trainer: The Trainer, whose callbacks are looked at.
        module: The module of a run that begins or is resumed.
        saved: The names that `frozen_in` returned when the checkpoint was saved; None: no such.
    """
    if trainer.fit_loop.restarted_mid_epoch:
        _begin_with_epoch(trainer, module)
        _say_what_is_lost(trainer)
    if saved is None:
        return
    now = frozen_in(module)
    parameters = dict(module.named_parameters())
    known = set(saved["parameters"]) & parameters.keys()
    thawed = [name for name in now["parameters"] if name not in known]
    froze = [name for name in parameters if name in known and name not in now["parameters"]]
    if not thawed and not froze:
        return
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks_of(trainer)):
        rank_zero_warn(
            f"{_shown(thawed or froze)} {'did' if thawed else 'did not'} train when the checkpoint "
            f"was saved, and {'does not' if thawed else 'does'} now; if that is not meant, set "
            "requires_grad in on_train_batch_start by `self.current_epoch >= ...`, which holds "
            "after a resume, too. (on_train_epoch_start does not run in an epoch that is resumed.)"
        )
        return
    for name in [*thawed, *froze]:
        parameters[name].requires_grad_(name in thawed)
    for name, norm in _norms(module).items():
        norm.track_running_stats = name not in saved["norms"]
    rank_zero_info(
        f"{_shown([*thawed, *froze])} {'trains' if thawed else 'is frozen'} again, as when the "
        "checkpoint was saved."
    )


def end_as_saved(trainer: Trainer, module: LightningModule) -> None:
    """Give the module the averages of a run that has no steps left, as its end would.

    Lightning then leaves the module the weights with which it would train on.
    """
    for callback in callbacks_of(trainer):
        is_swa = isinstance(callback, StochasticWeightAveraging)
        ended = is_swa and trainer.current_epoch - 1 == callback.swa_end
        if ended or isinstance(callback, WeightAveraging):
            callback.on_train_end(trainer, module)


def _begin_with_epoch(trainer: Trainer, module: LightningModule) -> None:
    """Let callbacks that begin with an epoch begin in the one that is resumed inside."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)
        elif isinstance(callback, StochasticWeightAveraging):
            _go_on_averaging(callback, trainer, module)


def _say_what_is_lost(trainer: Trainer) -> None:
    read: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    batches, accumulates = trainer.accumulate_grad_batches, read < trainer.num_training_batches
    if trainer.lightning_module.automatic_optimization and accumulates and read % batches:
        rank_zero_warn(
            f"the checkpoint was saved after {read % batches} of the {batches} batches whose "
            "gradients a step adds up, and holds none of these: the next step goes by the other "
            "batches alone. Save where a step has ended, as "
            "ModelCheckpoint(every_n_train_steps=...) does."
        )


def _go_on_averaging(
    callback: StochasticWeightAveraging, trainer: Trainer, module: LightningModule
) -> None:
    """Let averaging begin again at the rates that were, or the epoch of statistics after it."""
    last, now = callback.state_dict()["latest_update_epoch"], trainer.current_epoch
    if last == now:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        callback.on_train_epoch_start(trainer, module)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    elif last == callback.swa_end == now - 1:
        kept = [x.detach().clone() for x in (*module.parameters(), *module.buffers())]
        callback.on_train_epoch_start(trainer, module)  # it counts from nothing
        with torch.no_grad():
            for x, value in zip((*module.parameters(), *module.buffers()), kept, strict=True):
                x.copy_(value)


def _norms(module: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in module.named_modules() if hasattr(m, "track_running_stats")}


def _shown(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
