"""Stores complex parameters as pairs of real numbers, which FSDP2 can group with the others.

FSDP2 flattens the parameters of a block into one buffer of one dtype, so complex64 weights
(spectral convolutions) cannot stand beside float32 ones. Here the registered parameter becomes a
real tensor with a last dim of 2, and reading the attribute still gives the complex tensor; so does
`state_dict()`. torch's optimizers update complex parameters as such pairs, so training is
unchanged.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.processes.torch_private.internals import own_parameters
from lightning_shard.processes.torch_private.typed import named_modules
from lightning_shard.tensor.mixins import Mixin, mix_in


class _ComplexView(Mixin):
    """Mixin of a module whose parameters named in `_pairs` are read as complex tensors."""

    _pairs: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        if name not in self.__dict__.get("_pairs", ()) or isinstance(value, DTensor):
            return value  # a sharded one is FSDP2's own
        return value if value.is_complex() else torch.view_as_complex(value)


def store_as_pairs(root: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Replace each complex parameter that has dims by a pair of real ones; shared stay shared.

    Returns:
        The new parameter of each that was replaced.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(root.modules()):
        own = own_parameters(module).items()
        # one without dims stays whole, for FSDP2 would part its two numbers
        names = [n for n, p in own if p is not None and p.is_complex() and p.ndim]
        for name in names:
            old = own_parameters(module)[name]
            assert old is not None
            if old not in replaced:
                pairs = torch.view_as_real(old.detach().resolve_conj()).clone()
                replaced[old] = nn.Parameter(pairs, requires_grad=old.requires_grad)
            own_parameters(module)[name] = replaced[old]
        if names:
            mix_in(module, _ComplexView, _pairs=frozenset(names))
            module.register_state_dict_post_hook(_give_complex)
            module.register_load_state_dict_pre_hook(_take_complex)
    return replaced


def pair_names(root: nn.Module) -> set[str]:
    """Return the qualified names of the parameters under `root` that are stored as pairs."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in named_modules(root, remove_duplicate=False)
        for name in module.__dict__.get("_pairs", ())
    }


def as_complex(pairs: Tensor) -> Tensor:
    """Return the complex tensor of a parameter that is stored as pairs; a DTensor stays one."""
    if not isinstance(pairs, DTensor):
        return torch.view_as_complex(pairs.contiguous())
    local = torch.view_as_complex(pairs.to_local().contiguous())
    return placed_as(pairs, local, pairs.shape[:-1])


def as_pairs(value: Tensor) -> Tensor:
    """Return the pairs of real numbers of a complex tensor, as `as_complex` takes them."""
    if not isinstance(value, DTensor):
        return torch.view_as_real(value.resolve_conj())
    local = torch.view_as_real(value.to_local().resolve_conj())
    return placed_as(value, local, (*value.shape, 2))


def placed_as(like: DTensor, local: Tensor, shape: Sequence[int]) -> DTensor:
    """Make a DTensor of `shape`, placed as `like`, of which this rank holds `local`."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _give_complex(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In a state dict, but not where the parameters themselves are asked for."""
    for name in module.__dict__["_pairs"]:
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = as_complex(value)


def _take_complex(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in module.__dict__["_pairs"]:
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and value.is_complex():
            state[prefix + name] = as_pairs(value)
