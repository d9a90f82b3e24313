"""Trains on a device in tiles: the ranks of a domain take turns in one process.

Several such processes, each with a device, are data replicas of each other.
"""

import copy
import dataclasses
import inspect
import itertools
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.foreign import plain_name
from lightning_shard.checkpoint.state import (
    full,
    full_optimizer_state,
    module_state,
    parameter_names,
)
from lightning_shard.data.split import shard_batch
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.fsdp.materialize import is_deferred
from lightning_shard.fsdp.options import bytes_of
from lightning_shard.lab.batches import Stage
from lightning_shard.lab.batches_once import BatchesOnce, datasets_in, versions
from lightning_shard.lab.closures import Closures, holder_in
from lightning_shard.lab.least_tiles import LeastTiles, data_of, least_tiles
from lightning_shard.lab.simulate import in_turns
from lightning_shard.lab.simulated.one_device import OneDevice
from lightning_shard.lab.simulated.replicas import Replicas
from lightning_shard.lab.tiled_replicas import join_replicas, meeting_of, most_tiles
from lightning_shard.lab.tiles import (
    in_modes_of_caller,
    place_rows,
    refuse_to_offload,
    sizes_of_tiles,
)
from lightning_shard.processes.process_info import process_info
from lightning_shard.processes.torch_private.internals import unsaved_buffers
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer import process_mesh
from lightning_shard.trainer.environment import LauncherEnvironment
from lightning_shard.trainer.host import (
    Launcher,
    ParallelStrategy,
    callbacks_of,
    trainer_of,
)
from lightning_shard.trainer.notebook import NotebookLauncher
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.random_state import random_state, set_random_state
from lightning_shard.trainer.split_summary import split_summary
from lightning_shard.trainer.strategy import HybridShardStrategy

_LIGHTNING = ("lightning.", "pytorch_lightning.")
_AFTER_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")  # hooks of a batch
_STAGES: dict[TrainerFn, Stage] = {
    TrainerFn.FITTING: "fit",
    TrainerFn.VALIDATING: "validate",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}
_VALUES = (bool, int, float, str, type(None), np.ndarray, np.generic)


class TiledStrategy(HybridShardStrategy):
    """Trains on fields many times larger than a device, exactly, in tiles that take turns.

    Each tile is a rank of a domain, with a Trainer and a module of its own; all take turns in this
    process. While one computes, what the others hold lies in the host's memory. The first one has
    the callbacks, the loggers and the progress bar of the Trainer, and alone reads data, prints and
    writes checkpoints. The module has whole weights again once the run ends. Each further device is
    a data replica, which reads samples of its own and computes them in as many tiles.
    """

    strategy_name = "tiles"

    def __init__(
        self,
        tiles: int | str | Sequence[int] = 8,
        tile_memory: str | None = None,
        tile_budget: str | None = None,
        **options: Any,
    ) -> None:
        """Describe the tiles.

        Args:
            tiles: The number of tiles along the first spatial dim, or along each split dim, such as
                `[2, 4]`. "auto": the least number along the first dim that fits the device, found
                as the first stage begins.
            tile_memory: A directory in whose files waiting tiles lie, instead of the host's memory.
            tile_budget: Bytes that tiles may have on the device, such as "8GB": only what is above
                travels. By default all that a tile holds leaves when another one has its turn.
            options: Further arguments of `HybridShardStrategy`.

        Raises:
            ValueError: `tiles` is no number from 1 on, or an argument does not go with tiles.
        """
        sizes = (1,) if tiles == "auto" else sizes_of_tiles(tiles)
        if options.pop("domain_parallel_size", 1) not in (1, "auto"):
            raise ValueError(
                "tiles are the parts of a field, so they do not go with domain_parallel_size; "
                "leave it out, or use HybridShardStrategy, which splits a field over devices."
            )
        super().__init__(domain_parallel_size=sizes, **options)
        if self.sharding_options.mode == "hybrid":
            raise ValueError(
                'sharding="hybrid" spreads parameters over groups of processes, which tiles do not '
                'know; take "full" or "none".'
            )
        own = {"tiles": tiles, "tile_memory": tile_memory, "tile_budget": tile_budget}
        self._arguments = own | options
        if self.sharding_options.compile_blocks:
            raise ValueError(
                "compile_blocks hides from tiles what is computed inside of a graph, so it cannot "
                "wait in the host's memory; leave it out."
            )
        OneDevice(torch.device("cpu"), folder=tile_memory)  # refuses a folder that is none
        refuse_to_offload(self.sharding_options.activation_offload)
        self.tiles, self.tile_memory, self.tile_budget = sizes, tile_memory, tile_budget
        self.budget = None if tile_budget is None else bytes_of(tile_budget, "tile_budget")
        self.chosen: LeastTiles | None = None  # for "auto", once it is known
        self._is_auto = tiles == "auto"
        self.batches: BatchesOnce | None = None
        self.others = Peers(self._is_interrupted)  # the other replicas
        self._own_device: torch.device | None = None  # of the tiles, while they take turns
        self.names = set[str]()  # of what the caller's module stores, as a training begins
        self.has_failed = False  # so that the module is not what it was trained to be

    def choose_tiles(self, stage: TrainerFn | None, args: Any, kwargs: Any, precision: str) -> None:
        """Choose the number of tiles if it is "auto", say it, and keep it for further stages.

        Args:
            stage: The stage of the Trainer.
            args: The arguments of its method.
            kwargs: The same by name.
            precision: The precision of the Trainer.

        Raises:
            ValueError: The memory is not known, or no number is enough.
        """
        if not self._is_auto or self.chosen is not None:
            return
        module = self.lightning_module
        assert module is not None
        assert stage is not None
        options = self.sharding_options
        self.chosen = least_tiles(
            module, data_of(args, kwargs), self.root_device, self.tile_memory,
            self.tile_budget, stage=_STAGES[stage], shard_dims=self.shard_dims,
            sharding=options.mode, precision=precision,
            activation_checkpointing=options.activation_checkpointing,
        )  # fmt: skip
        rank_zero_info(str(self.chosen))
        self.tiles = self.processes.domain_sizes = (self.chosen.tiles,)

    @property
    def num_processes(self) -> int:
        """The number of ranks of this node: of tiles while they take turns."""
        return super().num_processes if self.batches is None else process_info().local_world_size

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of this process, which its tiles share."""
        return super().root_device if self._own_device is None else self._own_device

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, NotebookLauncher):
            raise ValueError(
                "in an interactive session tiles take turns on one device; use devices=1, or start "
                "a script for several replicas."
            )
        self._launcher = TilesLauncher(self._launcher)

    def meet_replicas(self, trainer: Trainer, args: Any, kwargs: Any) -> Replicas | None:
        """Join the processes of other replicas, agree with them, and choose the tiles.

        Args:
            trainer: The Trainer, whose stage begins.
            args: The arguments of its method.
            kwargs: The same by name.

        Returns:
            The meeting of all processes; None if this is the only one.

        Raises:
            ValueError: Replicas differ, or no number of tiles is known to be enough.
        """
        environment = self.cluster_environment
        assert environment is not None
        count = join_replicas(environment, self.processes, self.others)
        self.choose_tiles(trainer.state.fn, args, kwargs, trainer.precision)
        if count == 1:
            return None
        if self._is_auto:
            self.tiles = self.processes.domain_sizes = (most_tiles(*self.tiles),)
        return meeting_of(environment, self.processes, self.others, super().num_processes)

    @contextmanager
    def taking_turns(self, replicas: Replicas | None) -> Generator[BatchesOnce]:
        """Let the ranks of this process be tiles, while open.

        Args:
            replicas: The processes of the run; None: this is the only one.
        """
        environment, device = self.cluster_environment, self.root_device
        self.has_failed = False
        self.batches, self._own_device = BatchesOnce(math.prod(self.tiles), replicas), device
        try:
            yield self.batches
        finally:
            self.batches.give_back()
            self.batches = self._own_device = None
            self.cluster_environment = environment
            self.processes.mesh = None
            process_mesh.print_on_first_only(self.global_rank)

    # Data.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Let all tiles read one batch, which the first of them loads."""
        assert self.batches is not None
        return super().process_dataloader(self.batches.of(dataloader))

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Split a batch on the host, and move this tile's part of it.

        Where hooks look at a batch on the device, it is moved there as a whole.
        """
        before = versions(batch)
        trainer, cpu = self._module.trainer, torch.device("cpu")
        owners = self._module, getattr(trainer, "datamodule", None)
        sees = any(is_overridden(name, owner) for name in _AFTER_TRANSFER for owner in owners)
        first = self.root_device if sees else cpu
        whole = ParallelStrategy.batch_to_device(self, batch, first, dataloader_idx)
        if versions(batch) != before:
            raise RuntimeError(
                "a hook wrote in place into the batch that all tiles share, which would be done "
                "once for each tile; let on_before_batch_transfer or on_after_batch_transfer "
                "return new tensors, such as x / 2 for x.div_(2)."
            )
        batch = shard_batch(whole, self.domain_mesh, self.shard_dims)
        self.announced.say(split_summary(batch), self._module.trainer.state.fn, self.domain_size)

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            # a part may be a view of the whole, which must not stay on the device for it
            views = leaf.device.type != "cpu" or not isinstance(leaf, DomainTensor)
            return leaf.to(self.root_device, copy=views)

        return map_leaves(moved, batch)

    # Steps.

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Look for new layers before `configure_model`, which the caller's module runs as well."""
        self._refuse_new_layers()
        with super().model_sharded_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Look for new layers before parameters are sharded."""
        if not is_overridden("configure_model", self._module):
            self._refuse_new_layers()
        super().setup(trainer)

    def _refuse_new_layers(self) -> None:
        """Refuse layers that `setup` has made, which the caller's module would lack after a run."""
        new = sorted(_stored_names(self._module) - self.names) if self.names else []
        if new:
            raise ValueError(
                f"setup has made {new[0]!r}, which would be trained in the tiles' copies of "
                f"{type(self._module).__name__} and be lost after the run; make it in __init__ or "
                "in configure_model."
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute gradients, once the loss is seen to be the same in all tiles."""
        if self.batches is not None:
            self.batches.compare_loss(float(closure_loss.detach()))
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add to an error of memory that more tiles need less."""
        super().on_exception(exception)
        if self.batches is None:
            self.others.is_disconnected()  # which tells them why this one ends
        if isinstance(exception, torch.OutOfMemoryError):
            more = [2 * size for size in self.tiles]
            exception.add_note(
                "The device has no room for the tensors of one operator of one tile beside the "
                f"parameters; take more tiles, such as TiledStrategy({more})."
            )

    @override
    def teardown(self) -> None:
        """End a stage; the other replicas are watched until the next one begins."""
        super().teardown()
        if self.batches is None:
            self.others.pause_watch()

    # After the run the module and the optimizers of each process are whole.

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights, gathered from the tiles or, after the run, of one module."""
        if self.batches is None:
            return self._module.state_dict()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state, gathered from the tiles or, after the run, of one optimizer."""
        if self.batches is None:
            return optimizer.state_dict()
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write as one process does after a run; nothing after an error, which left half a step."""
        if self.has_failed:
            print(f"{filepath} was not saved: the tiles ended within a step.", file=sys.stderr)
        elif self.batches is None:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)


class TilesLauncher(Launcher):
    """Runs a stage of a Trainer on ranks in turns: the Trainer itself, and copies of it."""

    _former: nn.Module | None = None  # sharded by an earlier stage, to which the Trainer may point

    def __init__(self, outer: Launcher | None) -> None:
        """Begin.

        Args:
            outer: Starts the processes of other replicas; None where there are none, or where they
                have been started.
        """
        self._outer = outer

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """True: ranks are threads, which a notebook can start."""
        return True

    @override
    def kill(self, signum: Any) -> None:
        """End the processes of other replicas; this process ends its own ranks, its threads."""
        if self._outer is not None:
            self._outer.kill(signum)

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `function` on all ranks; return what it returns on the first.

        Raises:
            Exception: The error of the first rank that failed.
        """
        strategy: Any = trainer.strategy if trainer is not None else None
        if not isinstance(strategy, TiledStrategy) or trainer is None:
            return function(*args, **kwargs)
        in_tiles = partial(self._in_tiles, strategy, trainer, function, args, kwargs)
        return in_tiles() if self._outer is None else self._outer.launch(in_tiles, trainer=trainer)

    def _in_tiles(
        self,
        strategy: TiledStrategy,
        trainer: Trainer,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        replicas = strategy.meet_replicas(trainer, args, kwargs)
        module = strategy.lightning_module
        assert isinstance(module, LightningModule)
        _refuse_held_parts(trainer, module)
        fits = trainer.state.fn == TrainerFn.FITTING
        strategy.names = _stored_names(module) if fits else set()
        shared = OneDevice(
            strategy.root_device, strategy.budget, strategy.tile_memory, replicas=replicas
        )
        with strategy.taking_turns(replicas) as batches:
            first = self._on_all(trainer, (function, args, kwargs, module), shared, batches)
        strategy.others.pause_watch()
        return first

    def _on_all(
        self,
        trainer: Trainer,
        call: tuple[Any, tuple[Any, ...], dict[str, Any], LightningModule],
        shared: OneDevice,
        batches: BatchesOnce,
    ) -> Any:
        strategy: Any = trainer.strategy
        calls = _calls(*call, [*self._kept(strategy, trainer)], batches.ranks)
        self._former = calls[0][3]
        before = {(id(part), name) for part, name in _replaced_methods(trainer)}
        run = _Run(strategy, calls, trainer.state.fn)
        try:
            with (
                _printing_once(shared.first_rank),
                _reading_together(),
                batches.stopping_between_steps(),
            ):
                batches.wait = lambda *how: shared.wait(*how)
                body = in_modes_of_caller(run.on_rank, strategy.root_device)
                first, *_ = in_turns(body, batches.ranks, shared)
        except BaseException:
            strategy.has_failed = run.fits and not run.is_whole
            raise
        finally:
            run.bring_back(call[3])
            for part, name in [*_replaced_methods(trainer)]:
                if (id(part), name) not in before:  # of this stage, which copies would call
                    delattr(part, name)
            if run.after is not None:
                set_random_state(run.after, strategy.root_device)
        return first

    def _kept(self, strategy: TiledStrategy, trainer: Trainer) -> Iterator[Any]:
        """Yield what all ranks share, and what an earlier stage has left, which has no copies."""
        yield from (self, strategy.batches, strategy.others, *trainer.loggers)
        if self._former is not None:
            yield from self._former.modules()
        for part in (strategy, *vars(strategy).values()):
            values = vars(part).values() if hasattr(part, "__dict__") else ()
            yield from (value for value in values if isinstance(value, DeviceMesh))


class _Run:
    """One stage of a Trainer on all ranks.

    Attributes:
        fits: True if the stage trains.
        is_whole: True once the weights of all ranks have been put together.
        after: The random numbers with which the caller goes on.
    """

    def __init__(self, strategy: TiledStrategy, calls: list[Any], stage: TrainerFn | None) -> None:
        self.fits, self.is_whole = stage == TrainerFn.FITTING, False
        self.after: Any = None
        self._strategy, self._calls = strategy, calls
        self._predicts = stage == TrainerFn.PREDICTING
        self._reads = False  # weights of a checkpoint
        self._wholes: dict[Any, Tensor] = {}
        self._kept: dict[tuple[str, str], Any] = {}  # attributes with fields, by part and name
        self._weights: dict[str, Any] = {}
        self._optimizers: list[tuple[Optimizer, list[str], dict[str, Any]]] = []

    def on_rank(self) -> Any:
        """Run the stage on one rank."""
        batches = self._strategy.batches
        assert batches is not None
        tile = batches.tile()
        function, args, kwargs, module = self._calls[tile]
        strategy = function.__self__.strategy
        strategy.cluster_environment = LauncherEnvironment(process_info())
        strategy.set_world_ranks()
        try:
            result = function(*args, **kwargs)
        except KeyboardInterrupt:  # between two steps, on all ranks
            self.after = self.after or random_state(strategy.root_device)
            self._gather(strategy, module, first=tile == 0)
            raise
        except BaseException:  # of the rank that failed; the others end after it
            self.after = self.after or random_state(strategy.root_device)
            raise
        self._reads = bool(function.__self__.ckpt_path)
        self._gather(strategy, module, first=tile == 0)
        self._keep_fields(module)
        if self._predicts and result is not None:
            self._join(result, itertools.count())
        if tile == 0:
            self.after = random_state(strategy.root_device)
        return result

    def _gather(self, strategy: TiledStrategy, module: nn.Module, *, first: bool) -> None:
        if not self.fits and not self._reads:
            return
        weights = full(module_state(module), keep=first)
        for optimizer in strategy.optimizers if self.fits else ():
            state = full_optimizer_state(optimizer, module)
            if first:
                self._optimizers.append((optimizer, parameter_names(optimizer, module), state))
        if first:
            self._weights, self.is_whole = weights, True

    def _join(self, predictions: list[Any], numbers: Iterator[int]) -> None:
        """Let predictions be whole tensors on the host, in their lists, which the Trainer has."""

        def whole(leaf: Any) -> Any:
            return self._whole(leaf, next(numbers)) if isinstance(leaf, DomainTensor) else leaf

        for place, batch in enumerate(predictions):
            if type(batch) is list:  # of one of several loaders, or of a step
                self._join(batch, numbers)
            else:
                predictions[place] = map_leaves(whole, batch)

    def _whole(self, field: DomainTensor, key: Any) -> Tensor:
        """Return the whole tensor on the host, of which each rank adds its rows in its turn."""
        place_rows(field, self._wholes, key)
        return self._wholes[key]

    def _keep_fields(self, module: nn.Module) -> None:
        """Put together the fields that a module has kept in its attributes."""
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if name[0] == "_" or not any(isinstance(x, DomainTensor) for x in leaves_of(value)):
                    continue
                numbers = itertools.count()

                def whole(leaf: Any, place: Any = (path, name), numbers: Any = numbers) -> Any:
                    is_field = isinstance(leaf, DomainTensor)
                    return self._whole(leaf, (*place, next(numbers))) if is_field else leaf

                self._kept[path, name] = map_leaves(whole, value)

    def bring_back(self, module: LightningModule) -> None:
        """Let the caller's module be what the first rank's has become, and the Trainer know it."""
        trained = self._calls[0][3]
        self._strategy.connect(module)
        if (trainer := trainer_of(trained)) is not None:
            module.trainer = trainer
        own_parts = dict(module.named_modules())
        for part, other in trained.named_modules():
            for name, held in vars(other).items():
                value = self._kept.get((part, name), held)
                if part in own_parts and name[0] != "_" and _is_value(value):
                    setattr(own_parts[part], name, map_leaves(_detached, value))
        if not self.is_whole:
            return
        with self._strategy.precision_plugin.module_init_context():
            module.configure_model()  # layers that only the ranks have yet
        if not is_deferred(module):
            self._strategy.precision_plugin.convert_module(module)
        names = {plain_name(name): name for name in module.state_dict()}
        weights = {names.get(name, name): value for name, value in self._weights.items()}
        module.load_state_dict(weights, strict=False, assign=is_deferred(module))
        parameters = {
            plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)
        }
        for optimizer, names, state in self._optimizers:
            left = iter(names)
            for group in optimizer.param_groups:
                group["params"] = [parameters[next(left)] for _ in group["params"]]
            optimizer.state.clear()
            optimizer.load_state_dict(state)


def _calls(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: LightningModule,
    known: list[Any],
    ranks: int,
) -> list[tuple[Any, Any, Any, LightningModule]]:
    """Return what each rank calls: the first one the Trainer itself, with a copy of the module."""
    shared: dict[int, Any] = {id(x): x for x in datasets_in((args, kwargs))}
    shared |= {id(each): each for each in known}
    found: list[tuple[Any, Any, Any, LightningModule]] = []
    profiler = function.__self__.profiler
    for _ in range(1, ranks):
        memo = shared | {id(profiler): PassThroughProfiler()}  # the first rank alone measures
        try:
            with _copying_without_graphs():
                called, values, named, own = copy.deepcopy((function, args, kwargs, module), memo)
                Closures(memo).renew(own)
        except (TypeError, RuntimeError) as error:  # of a lock, an open file, a part of a graph
            raise TypeError(
                "each tile has a copy of the module, its data module and the callbacks, but one of "
                f"them holds what cannot be copied ({error}); make it in setup, or give its class "
                "a __deepcopy__ that returns itself."
            ) from error
        found.append((called, values, named, own))
    with _copying_without_graphs():
        memo = {id(x): x for x in (*shared.values(), function.__self__)}
        own = copy.deepcopy(module, memo)
        Closures(memo).renew(own)
    values = tuple(own if x is module else x for x in args)
    named = {name: own if x is module else x for name, x in kwargs.items()}
    function.__self__.strategy.connect(own)
    return [(function, values, named, own), *found]


def _stored_names(module: nn.Module) -> set[str]:
    """Name the parameters and buffers that a checkpoint of the module has, without wrappers."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in unsaved_buffers(part)
    }
    buffers = {name for name, _ in module.named_buffers()} - left_out
    return {
        plain_name(name) for name in ({name for name, _ in module.named_parameters()} | buffers)
    }


def _refuse_held_parts(trainer: Trainer, module: LightningModule) -> None:
    """Refuse callbacks that hold what each tile has of its own.

    Raises:
        ValueError: A callback holds a part of the module, or a function that does.
    """
    parts = {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers())}
    for callback in callbacks_of(trainer):
        name = holder_in(callback, parts)
        if name is not None:
            raise ValueError(
                f"the callback {type(callback).__name__} holds a part of the module in {name!r}, "
                "but each tile has a module of its own; let the callback take it from pl_module, "
                "which its hooks are given."
            )


@contextmanager
def _copying_without_graphs() -> Generator[None]:
    """Let tensors be copied that are parts of a graph, such as values of metrics, while open."""
    plain = Tensor.__deepcopy__

    def copied(self: Tensor, memo: dict[int, Any]) -> Any:
        return plain(self if self.is_leaf else self.detach(), memo)

    Tensor.__deepcopy__ = copied
    try:
        yield
    finally:
        Tensor.__deepcopy__ = plain


def _replaced_methods(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Yield the parts of a Trainer that have a method other than their class's, with its name."""
    left, seen = list[Any]([trainer, *callbacks_of(trainer)]), set[int]()
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, LightningModule | TiledStrategy):
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if callable(value) and inspect.isfunction(getattr(type(part), name, None)):
                yield part, name
            elif type(value).__module__.startswith(_LIGHTNING) and hasattr(value, "__dict__"):
                left.append(value)


@contextmanager
def _printing_once(first: int) -> Generator[None]:
    """Let the first rank of this process alone print and log, while open."""
    handle, streams = logging.Logger.handle, (sys.stdout, sys.stderr)

    def first_only(self: logging.Logger, record: logging.LogRecord) -> None:
        if _runs(first):
            handle(self, record)

    logging.Logger.handle = first_only
    sys.stdout, sys.stderr = (_OfOne(stream, first) for stream in streams)
    try:
        yield
    finally:
        logging.Logger.handle = handle
        sys.stdout, sys.stderr = streams


@contextmanager
def _reading_together() -> Generator[None]:
    """Let ranks wait for each other while they read a checkpoint, where Lightning holds a lock.

    The lock keeps names of Lightning 1.2, for files that need code; ours are read without code.
    """
    reader: Any = checkpoint_connector
    before, reader.pl_legacy_patch = reader.pl_legacy_patch, nullcontext
    try:
        yield
    finally:
        reader.pl_legacy_patch = before


class _OfOne:
    """A stream into which one rank alone writes."""

    def __init__(self, stream: Any, rank: int) -> None:
        self._stream, self._rank = stream, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write on the one rank."""
        return self._stream.write(text) if _runs(self._rank) else len(text)


def _runs(rank: int) -> bool:
    """Return True on this rank, and where no rank has its turn."""
    return os.environ.get("RANK", "0") in (str(rank), "0")


def _detached(value: Any) -> Any:
    """Return a tensor without its graph, as that of a metric's state after a training step."""
    return value.detach() if isinstance(value, Tensor) else value


def _is_value(value: Any) -> bool:
    """Return whether a value is made of numbers, texts, arrays and plain tensors of the host."""
    if isinstance(value, dict):
        return all(_is_value(x) for x in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_value, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_value(getattr(value, each.name, None)) for each in dataclasses.fields(value))
    plain: Any = value
    return isinstance(plain, _VALUES) or (type(plain) is Tensor and plain.device.type == "cpu")


if TiledStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        TiledStrategy.strategy_name, TiledStrategy, description="one device, in tiles"
    )
