"""Gives the state of sharded modules and optimizers as unsharded ones have it.

A state is first a view of this rank's shards: DTensors, in which parameters that are stored as
pairs of real numbers are complex again. `full` gathers such a view, one tensor at a time;
checkpoint/directory.py writes it as it is.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.foreign import by_index, plain_name
from lightning_shard.checkpoint.prepared import is_prepared, reattached
from lightning_shard.checkpoint.stored import StoredTensor, own_region
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.fsdp.complex_pairs import as_complex, as_pairs, pair_names, placed_as
from lightning_shard.processes.errors_together import copy_from_first
from lightning_shard.processes.narrow import is_dict
from lightning_shard.tensor.mixins import own_class
from lightning_shard.tensor.placement import gather, is_field

_MARK = "lightning_shard.extra"  # stands where a DTensor was taken out of a tree
Tree = dict[str, Any]


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return `optimizer.state_dict()`, keyed by integers, with sharded tensors as DTensors.

    torch's `get_optimizer_state_dict` knows names, but not that a parameter is stored as pairs of
    real numbers: of a complex weight (3, 2) it gives moments (3, 2, 2) of float32, which an
    unsharded run does not load.
    """
    paired = _pair_parameters(module)
    state = optimizer.state_dict()
    held: dict[int, Tree] = state["state"]
    entries: dict[int, Tree] = {}
    for index, values in held.items():
        p = _parameters(optimizer)[index]
        entries[index] = {
            key: as_complex(v) if p in paired and _like_parameter(v, p) else v
            for key, v in values.items()
        }
    return {**state, "state": entries}


def full_module_state(module: nn.Module) -> dict[str, Any]:
    """Gather `module.state_dict()`, as whole plain tensors on the CPU. All ranks call it.

    Names are those of the module, as in plain Lightning: a block that a program has compiled keeps
    `_orig_mod.`, which torch's `get_model_state_dict` takes out. Asked for whole tensors, that
    function refuses a state dict with anything else in it, such as neuralop's `_metadata`, and all
    of them are whole at once on rank 0.
    """
    return full(module.state_dict())


def full_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Gather `optimizer.state_dict()`, as whole plain tensors on the CPU. All ranks call it."""
    return full(optimizer_state(optimizer, module))


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module) -> None:
    """Load the state of an optimizer that was saved on any mesh, by us or by others.

    Args:
        optimizer: An optimizer of parameters of `module`.
        state: The result of `full_optimizer_state`, the `state_dict()` of an unsharded run, or a
            state by names (FSDP, torch.distributed.checkpoint.state_dict). Tensors may be
            `StoredTensor`s. Each rank reads its part.
        module: The module that holds the parameters.

    Raises:
        ValueError: The state is of other parameters.
    """
    names = iter(parameter_names(optimizer, module))
    groups = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    state = by_index(state, groups)
    optimizer.load_state_dict(_own_state(optimizer, state, _pair_parameters(module)))


def split_what_is_loaded(optimizer: Optimizer, module: nn.Module) -> None:
    """Let `optimizer.load_state_dict` take the state of one process, from now on."""
    paired = _pair_parameters(module)
    optimizer.register_load_state_dict_pre_hook(lambda o, state: _own_state(o, state, paired))


def _own_state(
    optimizer: Optimizer, state: Mapping[str, Any], paired: set[Tensor]
) -> dict[str, Any]:
    """Return a state with this rank's parts of the whole tensors in it."""
    groups = _each(_whole, state["param_groups"])  # a learning rate may be a tensor
    # torch's set_optimizer_state_dict names them; Optimizer.load_state_dict goes by their order too
    keys = [key for group in groups for key in group["params"]]
    parameters = dict(zip(keys, _parameters(optimizer), strict=False))
    entries = {
        key: _each(partial(_own_part, parameters[key], parameters[key] in paired), values)
        if key in parameters
        else values
        for key, values in state["state"].items()
    }
    return {**state, "state": entries, "param_groups": groups}


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Name the optimizer's parameters, in the order of its state."""
    names: dict[Tensor, str] = {
        p: plain_name(n) for n, p in module.named_parameters(remove_duplicate=False)
    }
    return [names[p] for p in _parameters(optimizer)]


def share_buffers(state: dict[str, Any], module: nn.Module) -> None:
    """Make the buffers in `state` equal on all ranks, in place; all ranks call it.

    A buffer that is split is gathered. Others are those of rank 0, as under DDP.
    """
    parameters = {name for name, _ in module.named_parameters()}
    for name, value in state.items():
        if is_field(value):
            state[name] = gather(value.detach())
        if name not in parameters and isinstance(value, Tensor):
            copy_from_first(state[name])


def full(value: Any, keep: bool = True) -> Any:
    """Replace every sharded or split tensor in `value` by the whole one on the CPU.

    Args:
        value: Nested containers, as `map_leaves` opens them. All ranks must pass the same
            structure: the tensors are gathered one after the other, and no more than one of them
            exists whole at a time on ranks that do not keep them.
        keep: False on a rank that needs no result; tensors in it are then None.

    Raises:
        TypeError: There is a module in it that is prepared for several ranks.
    """
    if isinstance(value, DTensor):
        whole = _gathered(value)
        return whole.cpu() if keep else None
    if is_field(value):
        whole = gather(value.detach())
        return whole.cpu() if keep else None
    if isinstance(value, Tensor):
        if not keep:
            return None
        return value.detach().cpu() if value.device.type != "cpu" else value
    if is_dict(value):
        return _mapped(value, keep)
    if type(value) in (list, tuple):
        return type(value)(full(v, keep) for v in value)
    if any(isinstance(x, DTensor) or is_field(x) for x in leaves_of(value)):  # a dataclass, say
        return map_leaves(partial(full, keep=keep), value)
    if is_prepared(value):
        raise TypeError(
            f"a checkpoint cannot hold the module {own_class(value).__name__}, which is sharded: "
            "put its state_dict() into it, or keep parameters whole with sharding='none'."
        )
    if names := reattached(value):  # a callback among hyper-parameters
        value = copy.copy(value)
        for name in names:
            del vars(value)[name]
    return value


def _mapped(value: dict[Any, Any], keep: bool) -> dict[Any, Any]:
    changed = {key: full(v, keep) for key, v in value.items()}
    if all(changed[key] is v for key, v in value.items()):
        return value
    result = copy.copy(value)  # the class stays: a state dict keeps the versions of its modules
    result.update(changed)
    return result


def _gathered(value: DTensor) -> Tensor:
    """Gather the whole tensor; gloo sends no complex numbers, so they travel as pairs."""
    if value.device.type != value.device_mesh.device_type:  # shards that are kept on the CPU
        value = placed_as(value, value.to_local().detach(), value.shape)
    if not value.is_complex():
        return value.full_tensor().detach()
    pairs = as_pairs(value.detach())
    assert isinstance(pairs, DTensor)
    return as_complex(pairs.full_tensor())


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with the result of `function` for all that its dicts and lists hold."""
    if is_dict(value):
        return {key: _each(function, v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(function, v) for v in value)
    return function(value)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, StoredTensor) else value


def _own_part(parameter: Tensor, paired: bool, value: Any) -> Any:
    """Return this rank's part of a tensor in an optimizer's state that belongs to `parameter`."""
    shape = parameter.shape[:-1] if paired else parameter.shape
    if not isinstance(value, Tensor | StoredTensor) or isinstance(value, DTensor):
        return value
    if not shape or value.shape != shape:
        return _whole(value)
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


def take_out(value: Any, extra: dict[str, Any]) -> Any:
    """Return `value` with marks in place of its DTensors, which go into `extra`."""

    def taken(held: Any) -> Any:
        if not isinstance(held, DTensor):
            return held
        extra[name := str(len(extra))] = held
        return {_MARK: name}

    return _each(taken, value)


def put_back(value: Any, extra: Mapping[str, StoredTensor]) -> Any:
    """Put back into `value` the DTensors that `take_out` took out of it, whole."""
    if is_dict(value):
        if value.keys() == {_MARK}:
            return extra[value[_MARK]].whole()
        return {key: put_back(v, extra) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put_back(v, extra) for v in value)
    return value
