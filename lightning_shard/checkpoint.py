"""The state of sharded modules and optimizers, in the names, shapes and dtypes of unsharded ones.

A state is first a view of this rank's shards: DTensors, in which parameters that are stored as
pairs of real numbers are complex again. `full` gathers such a view, one tensor at a time;
sharded_directory.py writes it as it is.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.complex_params import as_complex, as_pairs, pair_names, placed_as
from lightning_shard.foreign import by_index, plain_name
from lightning_shard.load_weights import check_names, copy_weights, own_region
from lightning_shard.placement import gather
from lightning_shard.stored import StoredState, StoredTensor, bytes_of
from lightning_shard.tensor import DomainTensor

PART_BYTES = 2**28  # of a state that is read from disk


def module_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` under plain names, with sharded tensors as DTensors."""
    state = module.state_dict()
    for name in [name for name in state if plain_name(name) != name]:
        state[plain_name(name)] = state.pop(name)
    return state


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """`optimizer.state_dict()`, keyed by integers, with sharded tensors as DTensors."""
    paired = _pair_parameters(module)
    state = optimizer.state_dict()
    entries = {}
    for index, values in state["state"].items():
        p = _parameters(optimizer)[index]
        entries[index] = {
            key: as_complex(v) if p in paired and _like_parameter(v, p) else v
            for key, v in values.items()
        }
    return {**state, "state": entries}


def full_module_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole plain tensors on the CPU. All ranks must call it."""
    return full(module_state(module))


def full_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole plain tensors on the CPU. All ranks must call it."""
    return full(optimizer_state(optimizer, module))


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module) -> None:
    """Load the state of an optimizer that was saved on any mesh, by us or by others.

    Args:
        optimizer: Of `module`'s parameters.
        state: What `full_optimizer_state` returned, the `state_dict()` of an unsharded run, or a
            state by names (FSDP, torch.distributed.checkpoint.state_dict). Tensors may be
            `StoredTensor`s. Each rank reads its part.
        module: Whose parameters the optimizer holds.

    Raises:
        ValueError: The state is of other parameters.
    """
    paired = _pair_parameters(module)
    names = iter(parameter_names(optimizer, module))
    groups = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    state = by_index(state, groups)
    parameters = _parameters(optimizer)
    entries = {
        index: {
            key: _own_part(value, parameters[index], parameters[index] in paired)
            for key, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """The names of the optimizer's parameters, in the order of its state."""
    names: dict[Tensor, str] = {
        p: plain_name(n) for n, p in module.named_parameters(remove_duplicate=False)
    }
    return [names[p] for p in _parameters(optimizer)]


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """`module.load_state_dict`, of a part of the state at a time if it is not read yet.

    Raises:
        RuntimeError: `strict`, and names are missing or unknown; or shapes differ.
    """
    if not isinstance(state, StoredState):
        module.load_state_dict(state, strict=strict)
        return
    if isinstance(module, FSDPModule):
        copy_weights(module, state.stored, "the checkpoint", strict=strict)
        return
    missing, unknown = set(module.state_dict()), set()
    for part in _parts(state):
        keys = module.load_state_dict(part, strict=False)
        missing &= {*keys.missing_keys}
        unknown |= {*keys.unexpected_keys}
    check_names(sorted(missing), sorted(unknown), module, "the checkpoint", strict=strict)


def _parts(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part: dict[str, Any] = {}
    size = 0
    for name in state:
        part[name] = state[name]
        size += bytes_of(part[name])
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    yield part


def full(value: Any, keep: bool = True) -> Any:
    """`value` with every sharded or split tensor replaced by the whole one on the CPU.

    Args:
        value: Nested dicts, lists and tuples. All ranks must pass the same structure: the tensors
            are gathered one after the other, and no more than one of them exists whole at a time on
            ranks that do not keep them.
        keep: Whether this rank needs the result; otherwise tensors in it are None.
    """
    if isinstance(value, DTensor):
        whole = _gathered(value)
        return whole.cpu() if keep else None
    if isinstance(value, DomainTensor):
        whole = gather(value.detach())
        return whole.cpu() if keep else None
    if isinstance(value, Tensor):
        if not keep:
            return None
        return value.detach().cpu() if value.device.type != "cpu" else value
    if isinstance(value, dict):
        return _mapped(value, keep)
    if type(value) in (list, tuple):
        return type(value)(full(v, keep) for v in value)
    return value


def _mapped(value: dict[Any, Any], keep: bool) -> dict[Any, Any]:
    changed = {key: full(v, keep) for key, v in value.items()}
    if all(changed[key] is v for key, v in value.items()):
        return value
    result = copy.copy(value)  # of its class: a state dict keeps the versions of its modules
    result.update(changed)
    return result


def _gathered(value: DTensor) -> Tensor:
    """The whole tensor; gloo sends no complex numbers, so they travel as pairs."""
    if value.device.type != value.device_mesh.device_type:  # shards that are kept on the CPU
        value = placed_as(value, value.to_local().detach(), value.shape)
    if not value.is_complex():
        return value.full_tensor().detach()
    pairs = as_pairs(value.detach())
    assert isinstance(pairs, DTensor)
    return as_complex(pairs.full_tensor())


def _own_part(value: Any, parameter: Tensor, paired: bool) -> Any:
    """What this rank keeps of an optimizer's tensor that belongs to `parameter`."""
    shape = parameter.shape[:-1] if paired else parameter.shape
    if not isinstance(value, Tensor | StoredTensor):
        return value
    if not shape or value.shape != shape:
        return value.whole() if isinstance(value, StoredTensor) else value
    region = own_region(parameter)[: len(shape)]
    part = value.read(region) if isinstance(value, StoredTensor) else value[region]
    if paired and part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    part = part.to(local.device, copy=True, memory_format=torch.contiguous_format)
    return placed_as(parameter, part, parameter.shape) if isinstance(parameter, DTensor) else part


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _like_parameter(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _pair_parameters(module: nn.Module) -> set[Tensor]:
    names = pair_names(module)
    return {p for name, p in module.named_parameters(remove_duplicate=False) if name in names}
