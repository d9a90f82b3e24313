"""Has all that reads a private attribute of Lightning, as seen in Lightning 2.6.6.

Private names that are imported stand in lightning_shard/lightning.py. No other file has either, so
a new release of Lightning is read on these two pages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shard.lightning import (
    Callback,
    EarlyStopping,
    LightningModule,
    LightningOptimizer,
    Metadata,
    ModelCheckpoint,
    ResultMetric,
    SIGTERMException,
    Sync,
    Trainer,
    is_param_in_hook_signature,
)
from lightning_shard.processes.torch_private.internals import tree_leaves

# private attributes of Lightning's objects, each with what works by it; only this page reads them
ATTRIBUTES = {
    "_accelerator_connector": "loaders are read in the order of one process",
    "_batch_sampler": "a sampler of one's own repeats nothing in a prediction",
    "_broadcast_sigterm_tensor": "SIGTERM on any rank ends a training on all",
    "_combined_loader_states_to_load": "a loader that was made early goes on from its state",
    "_current_fx_name": "what a hook reads is told from what a step reads",
    "_data_fetcher": "the same as _combined_loader_states_to_load",
    "_data_source": "TiledStrategy('auto') reads a batch of the loader that fit was given",
    "_device": "self.device of a module is the device, where shards were not moved",
    "_device_mesh": "self.device_mesh of a module is the mesh",
    "_evaluate_stopping_criteria": "EarlyStopping stops all ranks by one value",
    "_evaluation_step": "an evaluation counts each sample once",
    "_get_cache": "a value of an epoch is reduced by its name",
    "_has_run": "a ModelCheckpoint saves alike where a rank had no sample to validate",
    "_is_sequential": "replicas repeat samples where a step reads several loaders",
    "_monitor_candidates": "a ModelCheckpoint saves by one value on all ranks",
    "_results": "logged values are reduced by name, and saved within an epoch",
    "_save_last_checkpoint": "Ctrl-C in a training saves what it has reached",
    "_should_check_val_fx": "a validation that the clock asks for begins on all ranks",
}

# the words that `self.log` was told, without functions
_PLAIN_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
    "dataloader_idx", "metric_attribute",
)  # fmt: skip


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Give the optimizer that Lightning has wrapped; the wrapper's state has no names."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def hook_of(module: Any) -> str:
    """Return the hook or step of a module that runs, as Lightning names it; "" for none."""
    return str(getattr(module, "_current_fx_name", None) or "")


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """Return the Trainer of a module; None where it has none."""
    with suppress(RuntimeError):
        return None if module is None else module.trainer
    return None


def tell_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Let `self.device_mesh` of the module be the mesh; without it that property raises."""
    module._device_mesh = mesh


def tell_device(module: LightningModule, device: torch.device) -> None:
    """Let `self.device` be the device, also where no parameter was moved: shards stay in place."""
    module._device = device


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list, which can be added to; Lightning does not declare it."""
    found: list[Callback] = vars(trainer)["callbacks"]
    return found


def add_once(trainer: Trainer, callback: Callback, *, first: bool = False) -> None:
    """Add a callback, last or `first`, to a Trainer that has none of its class."""
    callbacks = callbacks_of(trainer)
    if not any(isinstance(c, type(callback)) for c in callbacks):
        callbacks.insert(0 if first else len(callbacks), callback)


def inject_samplers(trainer: Trainer, inject: bool) -> bool:
    """Choose whether Lightning gives loaders its samplers; what was chosen before.

    Lightning's shuffle also where the loader does not, and in another order than in one process.
    """
    connector = trainer._accelerator_connector
    before: bool = connector.use_distributed_sampler
    connector.use_distributed_sampler = inject
    return before


def own_batches(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a loader, and not what Lightning puts around it to predict."""
    batches: Any = loader.batch_sampler
    return getattr(batches, "_batch_sampler", batches)


def data_of_stage(trainer: Trainer) -> Any:
    """Return the data module or the loader of a stage; None where the module has the loaders.

    Without it `TiledStrategy("auto")` cannot read a batch of the loader that `fit` was given.
    """
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        return data
    stage: Any = trainer.state.fn
    source = getattr(trainer, f"{stage.value}_loop")._data_source.instance
    return None if isinstance(source, LightningModule) else source


def follow_reductions(
    trainer: Trainer, reducing: Callable[[str, int | None], AbstractContextManager[None]]
) -> None:
    """Let Lightning reduce each logged value within `reducing(name, samples)`, once for a Trainer.

    The samples are those of a value of one step; None for a value of an epoch.

    Without it a value is reduced without its name, and ranks that log others get their mean.
    """
    training = trainer.fit_loop.epoch_loop
    for loop in (training, training.val_loop, trainer.validate_loop, trainer.test_loop):
        results: Any = loop._results
        if "update_metrics" not in vars(results):
            update, cached = results.update_metrics, results._get_cache
            results.update_metrics = _named(update, reducing, results)
            results._get_cache = _named(cached, reducing, None)


def load_late_states(trainer: Trainer) -> None:
    """Give training loaders the states of a checkpoint where they began before it was read.

    `trainer.estimated_stepping_batches` in `configure_optimizers` makes them, and Lightning then
    forgets the states.
    """
    fit: Any = trainer.fit_loop
    if fit.restarting and (states := fit._combined_loader_states_to_load):
        loaders = [x for x in tree_leaves(trainer.train_dataloader) if hasattr(x, "state_dict")]
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
        iter(fit._data_fetcher)


def logged_so_far(trainer: Trainer) -> dict[str, Any]:
    """Return the numbers that callbacks read, and those of which an epoch of training takes one."""
    metrics = trainer.fit_loop.epoch_loop._results.items()
    return {
        "last": {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()},
        "epoch": [
            {
                "key": key,
                "meta": {name: getattr(m.meta, name) for name in _PLAIN_META},
                "reduce": how,
                "sync": (m.meta.sync.should, m.meta.sync.rank_zero_only),
                "states": {name: state.cpu() for name, state in m.metric_state.items()},
            }
            for key, m in metrics
            if m.is_tensor and m.meta.on_epoch and not m.has_reset
            for how in ("mean", "sum", "max", "min")
            if getattr(m.meta, f"is_{how}_reduction")
        ],
    }


def log_on(trainer: Trainer, logged: dict[str, Any]) -> None:
    """Go on with the numbers that `logged_so_far` returned."""
    trainer.callback_metrics.update(logged["last"])
    if trainer.fit_loop.resumed_on_epoch_end:  # it was saved before schedulers follow a value
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    if not (logged["epoch"] and trainer.fit_loop.restarted_mid_epoch):
        return
    results: Any = trainer.fit_loop.epoch_loop._results
    whole_reset, device = results.reset, trainer.strategy.root_device

    def reset(metrics: bool | None = None, fx: str | None = None) -> None:
        if fx is None:  # the epoch has ended; before, Lightning would count from the next step on
            del vars(results)["reset"]
            whole_reset(metrics)

    vars(results)["reset"] = reset
    for entry in logged["epoch"]:
        meta = Metadata(**entry["meta"], reduce_fx=entry["reduce"])
        meta.sync = Sync(trainer.strategy.reduce, *entry["sync"])
        metric: Any = ResultMetric(meta, True)
        for name, value in entry["states"].items():
            setattr(metric, name, value.clone())
        metric._update_count = 1
        results[entry["key"]] = metric.to(device)


def _named(plain: Callable[..., Any], reducing: Callable[..., Any], results: Any) -> Any:
    """Name what `plain` reduces: a metric, or the metric of a key in `results`.

    A number of shards, such as the norm of a gradient, is read here, where all ranks log it. A
    progress bar would read it on the first rank alone.
    """

    def call(metric: Any, *args: Any) -> Any:
        meta = (metric if results is None else results[metric]).meta
        if args and isinstance(args[0], DTensor):
            args = args[0].full_tensor(), *args[1:]
        with reducing(meta.name, None if results is None else args[-1]):
            return plain(metric, *args)

    return call


def not_reduced(trainer: Trainer) -> list[str]:
    """Return the names of the values that Lightning will reduce as an epoch ends, in its order."""
    results: Any = trainer._results
    metrics = [] if results is None else [metric for _, metric in results.valid_items()]
    return [
        metric.meta.name
        for metric in metrics
        if metric.meta.on_epoch and metric._computed is None
        if not metric.is_tensor or (metric.meta.sync.should and not metric.meta.sync.rank_zero_only)
    ]


def end_together(trainer: Trainer, any_rank: Callable[..., list[bool]]) -> None:
    """Let all ranks stop a training, or validate, after one batch, once one of them would.

    A clock, or a hook, sets `trainer.should_stop` on one rank alone. It takes the place of the
    message by which Lightning tells all ranks, before each batch, that rank 0 has had SIGTERM.

    Args:
        trainer: The Trainer, which is changed once.
        any_rank: Returns for each of its arguments whether it is True on any rank; all ranks call
            it.
    """
    fit: Any = trainer.fit_loop
    epoch = fit.epoch_loop
    if "_broadcast_sigterm_tensor" in vars(epoch):
        return
    has_sigterm = False

    def agree() -> None:
        nonlocal has_sigterm
        wishes = trainer.should_stop, trainer.received_sigterm
        trainer.should_stop, has_sigterm = any_rank(*wishes)

    def end() -> None:
        if has_sigterm:
            raise SIGTERMException

    validates = epoch._should_check_val_fx

    def all_validate(fetcher: Any) -> bool:
        wishes: bool = validates(fetcher)
        by_clock = trainer.val_check_batch is None
        return any_rank(wishes)[0] if by_clock else wishes

    end_of_batch = epoch.on_advance_end

    def end_batch(fetcher: Any) -> None:
        agree()
        end_of_batch(fetcher)

    epoch._broadcast_sigterm_tensor, epoch._should_check_val_fx = end, all_validate
    epoch.on_advance_end = end_batch
    epoch.val_loop.run = _followed(epoch.val_loop.run, agree)
    for name in ("setup_data", "on_run_start", "on_advance_start", "on_advance_end"):
        setattr(fit, name, _followed(getattr(fit, name), agree))


def follow_evaluation(
    trainer: Trainer, prepared: Callable[[Any], None], step: Callable[..., None]
) -> None:
    """Let `step(loop, plain, batch, ...)` run each step of an evaluation, once for a Trainer.

    Without it replicas must have the same number of batches, so that some samples count twice.

    Args:
        trainer: The Trainer.
        prepared: Called with a loop once it has its loaders.
        step: Called in place of a loop's step, with the loop and that step before its arguments.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        if "_evaluation_step" not in vars(loop):
            loop._evaluation_step = partial(step, loop, loop._evaluation_step)
            loop.setup_data = _followed(loop.setup_data, partial(prepared, loop))


def _followed(plain: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        result = plain(*args)
        then()
        return result

    return both


def reads_in_turn(loop: Any) -> bool:
    """Return True if each step of an evaluation reads one batch, of one loader after the other."""
    name = "test_step" if loop.trainer.testing else "validation_step"
    step = getattr(loop.trainer.lightning_module, name)
    takes_iterator = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    return loop._is_sequential and not takes_iterator


def pass_over(loop: Any, loader: int) -> None:
    """Count a step of an evaluation that this rank does not run, as if it had run it."""
    loop.batch_progress.increment_by(1, loop.batch_progress.is_last_batch)
    # values count to a loader where steps read several loaders in turn
    loop._results.dataloader_idx = loader if loop.num_dataloaders > 1 else None
    if not loop.trainer.sanity_checking:
        loop._has_run = True


def logged_by(loop: Any) -> list[tuple[Any, ...]]:
    """Describe what a loop has logged, for a rank that has logged nothing, which takes it over."""
    return [
        (
            key,
            {name: getattr(m.meta, name) for name in (*_PLAIN_META, "reduce_fx")},
            (m.meta.sync.should, m.meta.sync.rank_zero_only),
            m.value.dtype if m.is_tensor else None,
        )
        for key, m in loop._results.items()
        if not m.has_reset  # else of an earlier evaluation
    ]


def log_nothing(loop: Any, described: list[tuple[Any, ...]]) -> None:
    """Let a loop have logged the same names as another rank, with no samples."""
    results, trainer = loop._results, loop.trainer
    for key, meta_fields, sync, dtype in described:
        metric: Any = results.get(key)
        if metric is None:
            meta = Metadata(**meta_fields)
            meta.sync = Sync(trainer.strategy.reduce, *sync)
            results[key] = metric = ResultMetric(meta, dtype is not None)
            if dtype is None:
                metric.value = attrgetter(str(meta.metric_attribute))(trainer.lightning_module)
        metric.has_reset = False  # since an earlier evaluation; Lightning leaves out what is reset
        updated = [metric]
        if dtype is None:
            updated += metric.value.modules()
        else:
            metric.value = metric.value.to(dtype)
            metric.to(trainer.strategy.root_device)
        for each in updated:  # by others, so what was computed before is old (torchmetrics)
            vars(each)["_computed"] = None


def follow_candidates(callback: ModelCheckpoint, agreed: Callable[[Any], Any]) -> None:
    """Let a ModelCheckpoint decide by, and name files after, what `agreed` makes of the metrics."""
    if "_monitor_candidates" not in vars(callback):
        plain = callback._monitor_candidates
        vars(callback)["_monitor_candidates"] = lambda trainer: agreed(plain(trainer))


def save_last(trainer: Trainer, callback: ModelCheckpoint) -> None:
    """Let a ModelCheckpoint with `save_last` write its last checkpoint now; all ranks do."""
    callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))


def follow_stopping(callback: EarlyStopping, agreed: Callable[[Any], Any]) -> None:
    """Let an EarlyStopping decide by what `agreed` makes of its metric."""
    if "_evaluate_stopping_criteria" not in vars(callback):
        plain = callback._evaluate_stopping_criteria
        vars(callback)["_evaluate_stopping_criteria"] = lambda current: plain(agreed(current))


def option_types(parser: Any) -> dict[str, Any]:
    """List the options of a parser of jsonargparse, with their types; None for one without.

    Without it an error could name neither the options of a class nor the type of a value.
    """
    return {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
