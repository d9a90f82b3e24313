"""Runs a module for some steps with a Trainer that prints nothing and leaves no files.

This is the laboratory's only way to a Trainer. A `Task` says what is run and on which mesh; one
step is a run of one batch.

- `run_here(task, *callbacks)` runs it on the rank that this process or thread already is. Callbacks
  record what happens. A rank that runs alone, also on fake tensors, calls it inside
  `simulate.alone(...)` with copies of the module and the data of its own:
  `run_here(Task(module, data, [batch] * n, mesh), Cut(...))`.
- `on_each_rank(function, task)` starts the ranks of the mesh, as processes or simulated, gives each
  of them copies and its share of every batch, and returns what `function(task)` returned on each.

Batches, first weights and random numbers are the same in every run of a task. So what differs
between one process and several is the work of this package.
"""

import contextlib
import copy
import inspect
import logging
import math
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from lightning_utilities.core import rank_zero as rank_zero_module
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.lab.batches import STEPS, Stage, copy_of, kind_of
from lightning_shard.lab.simulate import simulate
from lightning_shard.lightning import (
    Callback,
    Checkpoint,
    DummyLogger,
    EarlyStopping,
    LightningDataModule,
    LightningModule,
    Trainer,
    refuse_mixture,
    seed_everything,
)
from lightning_shard.processes.forking import belongs_to_a_group
from lightning_shard.processes.launch import launch
from lightning_shard.processes.nearest import nearest
from lightning_shard.trainer.strategy import HybridShardStrategy

Mesh = tuple[int, ...]  # data replicas, and the ranks along each split dim
T = TypeVar("T")

# arguments of a Trainer that prints nothing, leaves no files, and takes batches in the given order
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


@dataclass(frozen=True)
class Task:
    """Some steps of a module on the ranks of a mesh.

    Attributes:
        module: The module; a run on each rank leaves it as it is, `run_here` changes it.
        data: The data module, which the module may ask for things; None if there is none.
        batches: One batch for each training step; for another stage one for each loader.
        mesh: The ranks; `()` for one process with Lightning's own strategy.
        stage: The method of the Trainer: "fit", or another one for evaluation or prediction.
        strategy: Arguments of `HybridShardStrategy` beside the mesh, such as `shard_dims`.
        trainer: Arguments of the Trainer, such as its precision or further callbacks.
        simulated: True if `on_each_rank` simulates the ranks in this process.
    """

    module: LightningModule
    data: LightningDataModule | None
    batches: Sequence[Any]
    mesh: Mesh = ()
    stage: Stage = "fit"
    strategy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trainer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    simulated: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no module, or one of the other package of Lightning."""
        refuse_mixture(self.module)
        given: Any = self.module
        if not isinstance(given, LightningModule):
            raise TypeError(f"a LightningModule is needed; got {kind_of(given)}.")


def on_each_rank(function: Callable[[Task], T], task: Task) -> list[T]:
    """Start the ranks of the task's mesh on this machine, and call `function(task)` on each.

    Each rank gets copies of the module and of the data module, and its data replica's share of
    every batch, in memory of its own.

    Returns:
        What the function returned, in the order of the ranks; tensors on the CPU.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the last line is its error.
        RuntimeError: This process is one of several itself, and the ranks are to be processes.
    """
    ranks = math.prod(task.mesh)
    if not task.simulated:
        if belongs_to_a_group():
            raise RuntimeError(
                "check and certify start ranks of their own, but this process is one of several "
                "already: a launcher has started it, or a Trainer, which runs a script once more "
                "for each of its processes. Give simulated=True, which takes ranks within this "
                "process, or call them in a program of their own, without a launcher."
            )
        return launch(_on_rank, function, task, processes=ranks)
    try:
        return simulate(partial(_on_rank, function, task), processes=ranks)  # copied there alone
    except Exception as error:
        trace = traceback.TracebackException.from_exception(error)
        trace.__notes__ = []
        raise ProcessRaisedException("".join(trace.format()), 0, os.getpid()) from error


def _on_rank(function: Callable[[Task], T], task: Task) -> T:
    module, data = copy_of(task.module), copy.copy(task.data)  # its datasets may be files
    replica = dist.get_rank() // max(1, math.prod(task.mesh[1:]))
    batches = [share(batch, replica, *task.mesh[:1]) for batch in task.batches]
    return function(replace(task, module=module, data=data, batches=batches))


def run_here(task: Task, *callbacks: Callback) -> Trainer:
    """Run the task on the rank that this process or thread is, and return its Trainer.

    The process group must be there. The module is changed, and the data module's loaders are
    replaced by the batches of the task.

    Args:
        task: The task to run; its batches are those of this rank's data replica.
        callbacks: Recorders of what happens.

    Raises:
        UnsupportedOperationError: The module uses an operation that cannot be split so.
    """
    seed_everything(0, verbose=False)
    options = {} if task.stage in ("fit", "predict") else {"verbose": False}
    with warnings.catch_warnings(), quiet(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = trainer_of(task, folder, *callbacks)
        getattr(trainer, task.stage)(task.module, **_loaders(task), **options)
    return trainer


def trainer_of(task: Task, folder: str, *callbacks: Callback) -> Trainer:
    """Build the quiet Trainer of a task for the processes of this group.

    Args:
        task: The task.
        folder: The folder of the logs, for steps that write files.
        callbacks: Recorders of what happens.
    """
    strategy: Any = "auto"
    if task.mesh:
        given = dict(task.strategy)
        dims = given.get("shard_dims")
        if isinstance(dims, list | tuple):  # those of a mesh with more axes
            given["shard_dims"] = dims[: len(task.mesh) - 1]
        strategy = HybridShardStrategy(
            data_parallel_size=task.mesh[0], domain_parallel_size=task.mesh[1:], **given
        )
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 1,  # a manual step may update the weights often, so batches are counted
        "max_steps": len(task.batches) if task.module.automatic_optimization else -1,
        "callbacks": [],
        **task.trainer,
    }
    options["callbacks"] = [_WithoutValidation(), *callbacks, *options["callbacks"]]
    options = QUIET | options | {"logger": _Forgetful(folder)}
    return Trainer(
        **options,
        strategy=strategy,
        limit_val_batches=0 if task.stage == "fit" else 1,
        limit_test_batches=1,
        limit_predict_batches=1,
    )


class _Forgetful(DummyLogger):
    """Takes what steps and callbacks log, of which some do not run without a logger."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @property
    @override
    def log_dir(self) -> str:
        return self._folder


class _WithoutValidation(Callback):
    """Lets training run without the metrics of a validation, which it does not have here."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop what the module adds to stop early or to save."""
        kept = [c for c in trainer.callbacks if not isinstance(c, Checkpoint | EarlyStopping)]  # pyright: ignore[reportAttributeAccessIssue] - not in Lightning's annotations
        trainer.callbacks = kept  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let schedulers that monitor such a metric stay as they are."""
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False


_levels: dict[logging.Logger, int] = {}  # levels of the loggers that are silenced
_silenced = 0  # how often: simulated ranks come and go in any order


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence what Trainers print about themselves, while open."""
    global _silenced
    if not _silenced:
        package = LightningModule.__module__.removesuffix(".core.module")
        last_imported = rank_zero_module.log  # both packages print with that of one of them
        for logger in (logging.getLogger(package), last_imported):
            _levels[logger] = logger.level
            logger.setLevel(logging.ERROR)
    _silenced += 1
    try:
        yield
    finally:
        _silenced -= 1
        if not _silenced:
            for logger, level in _levels.items():
                logger.setLevel(level)
            _levels.clear()


def samples_of(batch: Any) -> int:
    """Return the extent of the first dim of the first tensor of a batch; 1 if there is none."""
    sizes = [len(x) for x in leaves_of(batch) if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else 1


def share(batch: Any, replica: int, replicas: int = 1) -> Any:
    """Return the samples of one data replica, in memory of their own."""
    count = samples_of(batch)

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        whole = replicas == 1 or not x.ndim or len(x) != count
        return x.clone() if whole else x.chunk(replicas)[replica].clone()

    return map_leaves(part, batch)


def _loaders(task: Task) -> dict[str, Any]:
    """Return the arguments by which the Trainer reads the batches of the task."""
    if task.stage == "fit":
        given: Any = _loader(task.batches, batch_size=None)
    elif task.stage == "predict":  # numbers its samples, for which there must be a batch sampler
        given = [_loader([b], batch_size=1, collate_fn=lambda x: x[0]) for b in task.batches]
    else:
        given = [_loader([b], batch_size=None) for b in task.batches]
    if isinstance(given, list) and len(given) == 1:  # steps of one loader get no number of it
        given = given[0]
    if task.data is None:
        return {"train_dataloaders" if task.stage == "fit" else "dataloaders": given}
    setattr(task.data, STEPS[task.stage][1], lambda: given)
    return {"datamodule": task.data}


def _loader(batches: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(batches, **options)  # a list serves as a dataset


def as_mesh(mesh: int | str | Sequence[int]) -> Mesh:
    """Return a mesh in its one form: data replicas, and then the ranks along each split dim.

    Args:
        mesh: A number of ranks that share each sample; or data replicas and ranks along each split
            dim, as `(2, 4)` or as the command line writes it, "2x4".

    Raises:
        ValueError: It is no such mesh.
    """
    if isinstance(mesh, int):
        sizes = [1, mesh]
    elif isinstance(mesh, str):
        sizes = [int(size) if size.isdecimal() else 0 for size in mesh.split("x")]
    else:
        sizes = list(mesh)
    if len(sizes) < 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(
            f"a mesh is data replicas x ranks of a domain, such as (2, 2); got {mesh!r}."
        )
    return tuple(sizes)


def trainer_options(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function passes on to the Trainer, once their names are checked.

    Args:
        function: A public function with `**trainer`.
        given: The options that it got as `**trainer`.

    Raises:
        TypeError: Neither the function nor the Trainer has an argument of such a name, or the
            function chooses that argument of the Trainer itself.
    """
    ours = set(inspect.signature(function).parameters) - {"trainer"}
    chosen = {*QUIET, "strategy", "callbacks", "devices", "num_nodes", "max_steps"}
    known = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    for name in given:
        if name in ("domain_parallel_size", "data_parallel_size", "processes"):
            raise TypeError(
                f"{function.__name__}() has no argument {name!r}; give the ranks as mesh, data "
                "replicas and then the ranks along each split dim: mesh=(1, 2)."
            )
        if name in chosen:
            raise TypeError(f"{function.__name__}() chooses {name!r} of the Trainer itself.")
        if name not in known:
            close = nearest(name, [*ours, *(known - chosen)], "")
            raise TypeError(
                f"neither {function.__name__}() nor the Trainer has an argument {name!r}{close}"
            )
    return dict(given)
