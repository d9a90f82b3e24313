"""Full checkpoints of sharded modules and optimizers, in the format of an unsharded run.

What is written holds plain CPU tensors of the plain module's names, shapes and dtypes, so it loads
in any run, on any mesh, and without this package.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.complex_params import pair_names, to_complex
from lightning_shard.parallelize import split_like
from lightning_shard.placement import gather
from lightning_shard.tensor import DomainTensor


def full_module_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole plain tensors on the CPU. All ranks must call it."""
    pairs = pair_names(module)
    state = module.state_dict()
    return {
        name: to_complex(full(value)) if name in pairs else full(value)
        for name, value in state.items()
    }


def full_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole plain tensors on the CPU. All ranks must call it."""
    complex_of = _pair_parameters(module)
    state = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {}
    for index, values in state["state"].items():
        pairs = parameters[index] in complex_of if isinstance(index, int) else False
        entries[index] = {
            key: to_complex(full(v)) if pairs and _like_parameter(v, parameters[index]) else full(v)
            for key, v in values.items()
        }
    return {**state, "state": entries}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module) -> None:
    """Load what `full_optimizer_state` returned, or an unsharded run's state, on any mesh."""
    complex_of = _pair_parameters(module)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {}
    for index, values in state["state"].items():
        p = parameters[index]
        pairs = p in complex_of
        shape = p.shape[:-1] if pairs else p.shape
        entries[index] = {
            key: split_like(v, p, pairs)
            if isinstance(v, Tensor) and v.ndim and v.shape == shape
            else v
            for key, v in values.items()
        }
    optimizer.load_state_dict({**state, "state": entries})


def full(value: Any) -> Any:
    """`value` with every sharded or split tensor replaced by the whole one on the CPU."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    if isinstance(value, DomainTensor):
        return gather(value.detach()).cpu()
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.device.type != "cpu" else value
    if isinstance(value, dict):
        return _mapped(value)
    if type(value) in (list, tuple):
        return type(value)(map(full, value))
    return value


def _mapped(value: dict[Any, Any]) -> dict[Any, Any]:
    changed = {key: full(v) for key, v in value.items()}
    if all(changed[key] is v for key, v in value.items()):
        return value
    return changed


def _like_parameter(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _pair_parameters(module: nn.Module) -> set[Tensor]:
    names = pair_names(module)
    return {p for name, p in module.named_parameters(remove_duplicate=False) if name in names}
