"""Gathers, writes and reads back the checkpoints of a strategy."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_shard.checkpoint import directory as sharded_directory
from lightning_shard.checkpoint.errors import UnsafeFileError
from lightning_shard.checkpoint.foreign import OWN, as_lightning
from lightning_shard.checkpoint.prepared import holds_prepared
from lightning_shard.checkpoint.state import (
    full,
    load_optimizer_state,
    optimizer_state,
    parameter_names,
    share_buffers,
)
from lightning_shard.checkpoint.weights import does_not_fit, load_module_state
from lightning_shard.lightning import VERSION, CheckpointIO, rank_zero_warn
from lightning_shard.processes.errors_together import gather_to_first, together
from lightning_shard.processes.mesh import Sharding, replicas_of, sizes_of
from lightning_shard.processes.subgroups import writing_group
from lightning_shard.trainer.checkpoint_io import (
    Format,
    is_directory,
    is_local,
    local_path,
    refuse_other_formats,
)
from lightning_shard.trainer.host import plain_optimizer
from lightning_shard.trainer.random_state import random_state, set_random_state, storable

if TYPE_CHECKING:
    from concurrent.futures import Future

FORGOTTEN = (
    "Lightning 2.6 forgets weights_only=False for a module on the meta device, so build it on a "
    "real device"
)


class Saver:
    """Saves sharded modules and optimizers as ordinary Lightning checkpoints, or as directories.

    All ranks call each method, since all hold a part of what is saved.
    """

    def __init__(self, file_format: Format = "auto", *, timeout_s: float = 1800.0) -> None:
        """Choose how checkpoints are written.

        Args:
            file_format: "single": Lightning's file. "sharded": a directory. "async": a directory
                that is written while training goes on. "auto": a file or a directory, by size.
            timeout_s: Seconds that a rank waits for the others while it writes.

        Raises:
            ValueError: There is no such format.
        """
        refuse_other_formats(file_format)
        self.format: Format = file_format
        self.timeout_s = timeout_s
        # a step or a validation, and the random state before it
        self._begun: tuple[tuple[str, int] | None, dict[str, Any]] | None = None
        self.is_between_batches = False  # while a run that ends there saves
        self._read: str | Path = ""  # the checkpoint that was read last
        self._own: Mapping[str, Any] | None = None  # a loaded checkpoint's words on its run
        self.last_written: str | Path | None = None  # a checkpoint that is whole
        self.last_step = 0  # that of this one, or of the one that was read
        self._pending: Future[Any] | None = None  # a directory that is being written
        self._pending_is: tuple[str | Path, int] = "", 0  # its path and step

    def options(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, by name."""
        return {"checkpoint_format": self.format}

    def gather_module(self, module: nn.Module) -> dict[str, Any]:
        """Read the state of the module, with shards as they are."""
        state = module.state_dict()
        share_buffers(state, module)
        return state

    def gather_optimizer(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        """Read the state of the optimizer, keyed by the numbers of the parameters."""
        return optimizer_state(plain_optimizer(optimizer), module)

    def begin(self, what: tuple[str, int] | None, device: torch.device) -> None:
        """Note the random numbers with which a training step or a validation begins.

        Args:
            what: The word for it and the number of the step, as `unfinished` gives them.
            device: The device whose generator is noted beside the CPU's.
        """
        self._begun = (what, random_state(device))

    def mark(
        self,
        checkpoint: dict[str, Any],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        unfinished: tuple[str, int] | None = None,
        orders: Sequence[dict[str, Any] | None] = (),
        generators: Sequence[Tensor | None] = (),
        sharding: str = "full",
        logged: dict[str, Any] | None = None,
        frozen: dict[str, list[str]] | None = None,
    ) -> dict[str, Any]:
        """Add to the checkpoint the mesh, versions and random numbers with which a run resumes.

        Args:
            checkpoint: The checkpoint that Lightning has made.
            mesh: The mesh of all processes.
            device: The device whose generator is saved beside the CPU's.
            unfinished: The step or validation that is not complete, as on an exception. A resumed
                run makes it again, so the random numbers are those with which it began.
            orders: The numbers from which the order of samples was drawn, for each loader; empty
                ones if it begins to draw, and None if it has not begun.
            generators: The states of generators that samplers were given, for each loader.
            sharding: The mode of `ShardingOptions` with which the run trains.
            logged: The values that this rank has logged so far.
            frozen: The names of what the run does not train.
        """
        entry: dict[str, Any] = {
            "mesh": sizes_of(mesh),
            "sharding": sharding,
            "versions": {
                "torch": str(torch.__version__),
                "lightning": VERSION,
                "lightning_shard": version("lightning_shard"),
            },
        }
        if "optimizer_states" in checkpoint:
            begun = unfinished and self._begun is not None and self._begun[0] == unfinished
            state = self._begun[1] if begun and self._begun else random_state(device)
            nothing = "nothing" if self.is_between_batches else None
            entry["unfinished"] = unfinished[0] if unfinished else nothing
            entry["random"] = gather_to_first(storable(state))
            entry["logged"], entry["frozen"] = gather_to_first(logged), frozen
            entry["orders"] = [storable(o) if o else o for o in orders]
            entry["generators"] = [*generators]
        return checkpoint | {OWN: entry}

    def write(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        io: CheckpointIO,
        *,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        storage_options: Any = None,
    ) -> None:
        """Write a marked checkpoint, as a file or a directory.

        Args:
            checkpoint: The value that `mark` returned.
            path: The same path on all ranks.
            io: The plug-in that writes a file.
            module: The module that names the parameters; its buffers go to all ranks.
            optimizers: The optimizers in the order of the checkpoint's states.
            storage_options: Options that `io` takes.

        Raises:
            ValueError: The format is "sharded" and the path on no mounted file system.
        """
        self.finish()
        checkpoint = _without_prepared(checkpoint)
        share_buffers(checkpoint.get("state_dict", {}), module)  # averages, say, are copies
        if is_directory(self.format, checkpoint, path, io, options=storage_options):
            names = [parameter_names(optimizer, module) for optimizer in optimizers]
            self._write_directory(checkpoint, local_path(path), names)
        else:
            first = dist.get_rank() == 0
            whole = full(checkpoint, keep=first)
            together(lambda: first and io.save_checkpoint(whole, path, storage_options))
        self._pending_is = path, checkpoint.get("global_step", 0)
        if self._pending is None:
            self.last_written, self.last_step = self._pending_is

    def _write_directory(
        self, checkpoint: dict[str, Any], path: Path, names: list[list[str]]
    ) -> None:
        tensors, rest = sharded_directory.split_off(checkpoint, names)
        rest = full(rest, keep=dist.get_rank() == 0)
        own = checkpoint[OWN]
        about = {key: checkpoint[key] for key in ("epoch", "global_step") if key in checkpoint}
        about |= {key: own[key] for key in ("mesh", "versions")}
        about["world_size"] = dist.get_world_size()
        about["hyper_parameters"] = checkpoint.get("hyper_parameters", {})
        if self.format != "async":
            sharded_directory.write(path, tensors, rest, about)
            return
        group = writing_group(self.timeout_s)
        self._pending = sharded_directory.write_later(path, tensors, rest, about, group)

    def finish(self, *, together_with_all: bool = True) -> None:
        """Wait for a directory that is being written; all ranks raise if it failed.

        Args:
            together_with_all: False: forget it, since other ranks have failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None and together_with_all:
            together(pending.result)
            self.last_written, self.last_step = self._pending_is

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Delete a checkpoint, once what is being written is whole."""
        self.finish()
        if dist.get_rank() == 0:
            io.remove_checkpoint(path)

    def read(
        self,
        path: str | Path,
        io: CheckpointIO,
        module: nn.Module,
        *,
        weights_only: bool | None = None,
        into_sharded: bool = False,
    ) -> dict[str, Any]:
        """Read a file or a directory, also of other programs, as a checkpoint of Lightning's.

        Args:
            path: The file or the directory.
            io: The plug-in that reads a file.
            module: Its names tell how the weights of other programs are meant.
            weights_only: False if code in the file may run; None, the default, refuses it.
            into_sharded: True if the module is loaded only once it is sharded.

        Raises:
            UnsafeFileError: The file holds code.
        """
        self.finish()
        try:
            if is_local(path) and local_path(path).is_dir():
                folder = local_path(path)
                together(lambda: sharded_directory.check(folder))
                built = weights_only is False
                loaded = sharded_directory.read_directory(folder, not built, checked=True)
            else:
                loaded = io.load_checkpoint(path, weights_only=weights_only)
        except UnsafeFileError as err:
            if weights_only is None and into_sharded:
                raise UnsafeFileError(err.path, err.found, FORGOTTEN) from err
            raise
        checkpoint = as_lightning(loaded, path, module.state_dict())
        self._own, self._read = checkpoint.get(OWN), path
        self.last_step = checkpoint.get("global_step", 0)
        return checkpoint

    def load_module(
        self,
        module: nn.Module,
        checkpoint: Mapping[str, Any],
        device: torch.device,
        *,
        strict: bool,
    ) -> None:
        """Load the weights of a checkpoint that `read` returned.

        Raises:
            RuntimeError: They do not fit; with the file, both classes and their arguments.
        """
        try:
            load_module_state(module, checkpoint["state_dict"], strict)
        except (RuntimeError, ValueError) as err:
            saved = checkpoint.get("hyper_parameters")
            raise RuntimeError(f"'{self._read}' {does_not_fit(module, saved, err)}") from err
        for metric in module.modules():
            if isinstance(metric, Metric):  # it takes over the tensors of the file, on the CPU
                metric.to(device)

    def load_optimizers(
        self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any], module: nn.Module
    ) -> None:
        """Load the states of optimizers that hold parameters of the module.

        Raises:
            ValueError: The checkpoint holds another number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds {len(states)} optimizers; configure_optimizers returned "
                f"{len(optimizers)}. Return as many as when it was saved."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            load_optimizer_state(optimizer, state, module)

    def order(self, loader: int) -> dict[str, Any] | None:
        """Return the numbers from which the run that saved drew the sample order of a loader."""
        return self._of_loader("orders", loader)

    def generator(self, loader: int) -> Tensor | None:
        """Return the state of the generator that the sampler of a loader had been given."""
        return self._of_loader("generators", loader)

    def _of_loader(self, key: str, loader: int) -> Any:
        found = self._own.get(key, ()) if self._own is not None else ()
        return found[loader] if loader < len(found) else None

    def logged(self, mesh: DeviceMesh) -> dict[str, Any] | None:
        """Return what the run that saved had logged: on another mesh, this rank's share of it."""
        own = self._own or {}
        found: Sequence[dict[str, Any]] = own.get("logged", ())
        if not found:
            return None
        if own["mesh"] == sizes_of(mesh):
            return found[dist.get_rank()]
        share = replicas_of(own["mesh"]) / replicas_of(sizes_of(mesh))
        return found[0] | {"epoch": [_of_all(entry, found, share) for entry in found[0]["epoch"]]}

    def frozen(self) -> dict[str, list[str]] | None:
        """Return the names of what the run that saved did not train; None if they are not known."""
        return (self._own or {}).get("frozen")

    def sharding(self) -> Sharding | None:
        """Return the mode, "none" or "full", of the run that saved; None if it is not known."""
        mode = (self._own or {}).get("sharding")
        return mode if mode in ("none", "full") else None

    def unfinished(self) -> str | None:
        """Return what the run that saved had begun and not ended: "step" or "validation".

        It is "nothing" if the run saved between two batches, and None within hooks.
        """
        return (self._own or {}).get("unfinished")

    def forget(self) -> None:
        """Begin a stage for which nothing was read."""
        self._own = None

    def continue_random_numbers(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Go on with the random numbers of the run that saved: on another mesh, of its first rank.

        There the ranks have other parts, so only what all draw alike can go on.
        """
        own = self._own or {}
        if "random" in own:
            alike = own["mesh"] == sizes_of(mesh)
            set_random_state(own["random"][dist.get_rank() if alike else 0], device)


def _without_prepared(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out hyperparameters that hold a sharded module, which torch could not pickle."""
    kept = dict(checkpoint)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        held: Mapping[str, Any] = checkpoint.get(key, {})
        left = [name for name, value in held.items() if holds_prepared(value)]
        if left:
            rank_zero_warn(
                f"{', '.join(left)} among the hyperparameters holds a module that is prepared for "
                "several ranks, so it is left out of them; its weights are in the state_dict. Give "
                f"it to load_from_checkpoint(path, {left[0]}=...), or leave it out yourself by "
                f"self.save_hyperparameters(ignore=[{left[0]!r}])."
            )
            kept[key] = {name: value for name, value in held.items() if name not in left}
    return kept


def _of_all(
    entry: Mapping[str, Any], logged: Sequence[Mapping[str, Any]], share: float
) -> dict[str, Any]:
    """Join a value of the first rank with those of the others, and take a share of a sum."""
    same = [e["states"] for each in logged for e in each["epoch"] if e["key"] == entry["key"]]
    joined: dict[str, Any] = {}
    for name in entry["states"]:
        values = torch.stack([states[name] for states in same])
        if entry["reduce"] in ("max", "min"):
            joined[name] = values.amax(0) if entry["reduce"] == "max" else values.amin(0)
        else:
            joined[name] = values.double().mean(0) * share
    return {**entry, "states": joined}
