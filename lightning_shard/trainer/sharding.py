"""Shards the LightningModule with its first weights, and the copies that callbacks keep of it."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.state import split_what_is_loaded
from lightning_shard.checkpoint.weights import load_weights_together
from lightning_shard.fsdp.check_same_module import refuse_without_shape
from lightning_shard.fsdp.materialize import is_deferred
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.fsdp.parallelize import parallelize
from lightning_shard.fsdp.work import Moved
from lightning_shard.lightning import LightningModule, Trainer
from lightning_shard.processes.torch_private.internals import apply
from lightning_shard.trainer.host import callbacks_of
from lightning_shard.trainer.same_optimizers import simple_values

# predict_step runs with whole parameters, see Steps.keep_parameters_whole
STEPS = ("training_step", "validation_step", "test_step")
NEED_WHOLE_MATRICES = {"Muon"}  # torch's, which rounds the products of shards otherwise
_LOADED = "_weights_begun_with"  # attribute of a module
_DIVIDES = "_step_supports_amp_scaling"  # attribute of an optimizer, which scalers and clipping ask


def described(module: nn.Module, copied: Sequence[nn.Module] = ()) -> dict[str, str]:
    """Describe, by name, what the ranks' modules must have in common.

    Args:
        module: The module.
        copied: The copies of it that callbacks keep.
    """
    refuse_without_shape(module)
    facts = {"the number of copies that callbacks keep of the module": str(len(copied))}
    for name, t in itertools.chain(module.named_parameters(), module.named_buffers()):
        frozen = ", frozen" if isinstance(t, nn.Parameter) and not t.requires_grad else ""
        facts[name] = f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{frozen}"
    return facts | _layers(module)


def _layers(module: nn.Module) -> dict[str, str]:
    """The class of each layer, whether it trains, and the numbers and words of torch's layers."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        found[f"the class of {name or 'the module'}"] = type(layer).__qualname__
        found[f"{name}.training".lstrip(".")] = str(layer.training)
        if type(layer).__module__.startswith("torch.nn."):
            found |= simple_values(vars(layer), lambda key, name=name: f"{name}.{key}")
    return found


def to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move what has memory; the rest gets it once it is sharded, and shards stay where they are."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    return module if isinstance(module, FSDPModule) else apply(module, moved)


def copies(trainer: Trainer, module: LightningModule) -> list[nn.Module]:
    """Find the copies of `module` that callbacks keep, such as averages of its weights."""
    kept = (value for callback in callbacks_of(trainer) for value in vars(callback).values())
    modules = (value for value in kept if isinstance(value, nn.Module) and value is not module)
    return [m for value in modules for m in _of_type(value, type(module)) if m is not module]


def _of_type(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    return (m for m in module.modules() if type(m) is kind)


def shard_with_copies(
    module: nn.Module,
    copied: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    dims: tuple[int, ...] | None,
    options: ShardingOptions,
    files: Mapping[str, str] | None,
    device: torch.device,
    opens_steps: bool = False,
) -> Moved:
    """Shard a module, and like it the copies that callbacks keep of it.

    Args:
        module: The module with its steps.
        copied: The list that `copies` returned, before the module was sharded.
        mesh: The mesh of all processes.
        dims: The dims that the domain splits; None: not known.
        options: The options of the parameters.
        files: Weights to begin with, by submodule; None: a checkpoint is loaded afterwards.
        device: The device of this process.
        opens_steps: True if the caller opens `in_step` around steps with whole parameters.

    Returns:
        The new parameter for each old one.
    """
    loaded = ("",) if files is None else tuple(files)
    steps = [name for name in STEPS if hasattr(module, name)]  # Fabric's modules may have none
    if opens_steps and options.mode == "none":
        steps = []
    how: Any = {"dims": dims, "options": options}
    moved = parallelize(module, mesh, **how, methods=steps, loaded=loaded)
    if files is not None:
        load_first_weights(module, files)
    for copy in copied:
        older = is_deferred(copy) or files  # than the weights that the module has now
        parallelize(to_device(copy, device), mesh, **how, loaded=("",))
        if older and files is not None:
            copy_shards(module, copy)
    return moved


def load_first_weights(module: nn.Module, files: Mapping[str, str]) -> None:
    """Load the file of each submodule, once: a second fit goes on with the weights of the first."""
    if module.__dict__.get(_LOADED, {}) != files:
        for name, path in files.items():
            load_weights_together(module.get_submodule(name), path)
        module.__dict__[_LOADED] = dict(files)


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Copy the values of `source` into `target`, which is sharded in the same way."""
    pairs = zip(
        [*target.parameters(), *target.buffers()],
        [*source.parameters(), *source.buffers()],
        strict=True,
    )
    for to, value in pairs:
        to.copy_(value)


def mend_optimizers(
    optimizers: Sequence[Optimizer], module: nn.Module, moved: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Let optimizers that were made before the module was sharded train its new parameters.

    Raises:
        NotImplementedError: An optimizer of shards needs whole matrices.
        RuntimeError: An optimizer holds a parameter that was never the module's.
    """
    mine = set(module.parameters())
    is_sharded = any(isinstance(p, DTensor) for p in mine)
    if is_sharded and (kinds := {type(o).__name__ for o in optimizers} & NEED_WHOLE_MATRICES):
        raise NotImplementedError(
            f"the optimizer {min(kinds)} computes with whole matrices, of which each process holds "
            "a part; keep parameters whole with sharding='none'."
        )
    for group in itertools.chain.from_iterable(o.param_groups for o in optimizers):
        group["params"] = [p if p in mine else moved.get(p, p) for p in group["params"]]
        if any(p not in mine for p in group["params"]):
            raise RuntimeError(
                "an optimizer holds parameters that are not the module's, so it would train "
                "nothing; create it in configure_optimizers from self.parameters(), or from those "
                "of a module that fabric.setup has or is given."
            )
    if not is_sharded:
        return
    for optimizer in optimizers:
        step_one_by_one_if_mixed(optimizer)
        scale_no_gradient_of_mixed(optimizer)
        split_what_is_loaded(optimizer, module)


def step_one_by_one_if_mixed(optimizer: Optimizer) -> None:
    """Let an optimizer update a group parameter by parameter where torch cannot do it at once.

    Its foreach and fused kernels, the default on GPUs, take DTensors of one mesh, or plain tensors.
    A checkpoint has what was asked for.
    """
    asked: list[tuple[dict[str, Any], str, Any]] = []
    warned: set[str] = set()

    def before(*_: Any) -> None:
        for group in optimizer.param_groups:
            meshes = _meshes(group)
            for way in {"foreach", "fused"} & group.keys() if len(meshes) > 1 else ():
                if group[way] and way not in warned:
                    warned.add(way)
                    warnings.warn(
                        f"{way}=True updates parameters of one mesh; these are of {len(meshes)} "
                        "(kept whole, sharded over all ranks or over data replicas): one by one "
                        "instead.",
                        stacklevel=2,
                    )
                asked.append((group, way, group[way]))
                group[way] = False

    def after(*_: Any) -> None:
        while asked:
            group, way, value = asked.pop()
            group[way] = value

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def scale_no_gradient_of_mixed(optimizer: Optimizer) -> None:
    """Let a scaler divide the gradients itself where no fused kernel, which would, can run."""
    mixed = any(g.get("fused") and len(_meshes(g)) > 1 for g in optimizer.param_groups)
    if mixed and getattr(optimizer, _DIVIDES, False):
        setattr(optimizer, _DIVIDES, False)


def _meshes(group: dict[str, Any]) -> set[DeviceMesh | None]:
    return {p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}
