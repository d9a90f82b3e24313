"""The weights that training begins with: from files, once, and in copies that callbacks keep."""

import itertools
from collections.abc import Mapping

import torch
from torch import nn

from lightning_shard.load_weights import load_weights

_LOADED = "_weights_begun_with"  # attribute of a module


def to_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move what has memory; the rest gets it once it is sharded."""
    return module._apply(lambda t: t if t.is_meta else t.to(device))


def described(module: nn.Module) -> dict[str, str]:
    """The shape and dtype of each parameter and buffer, by name."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors}


def load_first_weights(module: nn.Module, files: Mapping[str, str]) -> None:
    """Load the file of each submodule, once: a second fit goes on with the weights of the first."""
    if module.__dict__.get(_LOADED, {}) != files:
        for name, path in files.items():
            load_weights(module.get_submodule(name), path)
        module.__dict__[_LOADED] = dict(files)


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, which is sharded alike, the values of `source`."""
    pairs = zip(
        [*target.parameters(), *target.buffers()],
        [*source.parameters(), *source.buffers()],
        strict=True,
    )
    for to, value in pairs:
        to.copy_(value)
