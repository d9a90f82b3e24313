"""Complex parameters as pairs of real numbers, which FSDP2 can group with the others.

FSDP2 flattens the parameters of a block into one buffer of one dtype, so complex64 weights
(spectral convolutions) cannot stand beside float32 ones. Here the registered parameter becomes a
real tensor with a last dim of 2, and reading the attribute still gives the complex tensor. torch's
optimizers update complex parameters as such pairs, so training is unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.mixins import mix_in


class _ComplexView:
    """Mixin of a module whose parameters named in `_pairs` are read as complex tensors."""

    _pairs: frozenset[str]

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing to register: the class stands for its base (tltorch would list it by name)."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        if name not in self.__dict__.get("_pairs", ()) or isinstance(value, DTensor):
            return value  # a sharded one is FSDP2's own
        return value if value.is_complex() else torch.view_as_complex(value)


def store_as_pairs(root: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Replace each complex parameter under `root` by a pair of real ones; shared ones stay shared.

    Returns:
        The new parameter of each that was replaced.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(root.modules()):
        names = [n for n, p in module._parameters.items() if p is not None and p.is_complex()]
        for name in names:
            old = module._parameters[name]
            assert old is not None
            if old not in replaced:
                pairs = torch.view_as_real(old.detach().resolve_conj()).clone()
                replaced[old] = nn.Parameter(pairs, requires_grad=old.requires_grad)
            module._parameters[name] = replaced[old]
        if names:
            mix_in(module, _ComplexView, _pairs=frozenset(names))
    return replaced


def pair_names(root: nn.Module) -> set[str]:
    """The qualified names of the parameters under `root` that are stored as pairs."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules(remove_duplicate=False)
        for name in module.__dict__.get("_pairs", ())
    }


def to_complex(value: Tensor) -> Tensor:
    """What a plain module would hold for a parameter stored as pairs."""
    return torch.view_as_complex(value.contiguous())
