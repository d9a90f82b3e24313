"""Weights from a file into a module that may be sharded: each rank reads its own part of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_shard.complex_params import pair_names
from lightning_shard.foreign import plain_names
from lightning_shard.stored import Region, StoredTensor
from lightning_shard.weight_files import stored_weights


def load_weights(module: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Copy the weights in a file into `module`, one tensor at a time, on any mesh.

    No rank reads more than its shard of a sharded parameter, and no collective runs, so each rank
    must see the file. What wrappers put into names is understood (`module.` of DDP,
    `_fsdp_wrapped_module.`, `_orig_mod.`).

    Args:
        module: An ordinary module, or one that `parallelize` or `fully_shard` sharded; its tensors
            have memory (`module.to_empty(device=...)` gives it to those of the meta device).
        path: A safetensors file, the index of several (`*.safetensors.index.json`), or a file of
            `torch.save`: a state dict, or a Lightning checkpoint; or a directory of
            torch.distributed.checkpoint, ours or Lightning's.
        strict: Whether the names in the file must be those of the module.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not whole, of another kind, would run code, or its tensors have other
            shapes.
        RuntimeError: `strict`, and names are missing or unknown; or a parameter has no memory.
    """
    copy_weights(module, stored_weights(path), f"'{path}'", strict=strict)


@torch.no_grad()
def copy_weights(
    module: nn.Module, stored: Mapping[str, Any], origin: str, *, strict: bool = True
) -> None:
    """The same for weights by name, which may be `StoredTensor`s; `origin` names them in errors."""
    targets = module.state_dict(keep_vars=True)
    pairs = pair_names(module)
    stored = plain_names(stored, targets)
    own = {*module.parameters(), *module.buffers()}
    loaded: set[Tensor] = set()
    rest: dict[str, Any] = {}
    for name, target in targets.items():
        if name not in stored:
            continue
        value = stored[name]
        if target not in own or not isinstance(value, StoredTensor | Tensor):
            rest[name] = value.whole() if isinstance(value, StoredTensor) else value
            continue
        _copy_part(name, target, value, paired=name in pairs, origin=origin)
        loaded.add(target)
    if rest:
        module.load_state_dict(rest, strict=False)  # extra state, which modules read themselves
    tensors = {k: v for k, v in targets.items() if isinstance(v, Tensor)}
    missing = [k for k, v in tensors.items() if k not in stored and v not in loaded]
    unknown = [k for k in stored if k not in targets]
    check_names(missing, unknown, module, origin, strict=strict)


def check_names(
    missing: list[str], unknown: list[str], module: nn.Module, origin: str, *, strict: bool
) -> None:
    """Raise a RuntimeError if names differ and `strict`."""
    problems = [f"has no {_listed(missing)}"] if missing else []
    problems += [f"has {_listed(unknown)}, which the module has not"] if unknown else []
    if strict and problems:
        raise RuntimeError(
            f"{origin} does not fit {type(module).__name__}: it {' and '.join(problems)}. Build "
            "the module as it was saved, or pass strict=False."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more


def _copy_part(name: str, target: Tensor, source: Any, *, paired: bool, origin: str) -> None:
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.is_meta:
        raise RuntimeError(
            f"'{name}' is on the meta device and has no memory: call module.to_empty(device=...) "
            "before load_weights."
        )
    if paired:
        local = torch.view_as_complex(local)
    shape = target.shape[:-1] if paired else target.shape
    as_pairs = local.is_complex() and source.shape == (*shape, 2) and not source.dtype.is_complex
    if source.shape != shape and not as_pairs:
        raise ValueError(
            f"'{name}' in {origin} has shape {tuple(source.shape)}; the module's has "
            f"{tuple(shape)}. Build the module as it was saved."
        )
    if source.dtype.is_complex and not local.is_complex():
        raise ValueError(f"'{name}' in {origin} is complex, the module's is {local.dtype}.")
    region = own_region(target)[: len(shape)]
    if as_pairs:
        region = (*region, slice(0, 2))
    part = source.read(region) if isinstance(source, StoredTensor) else source[region]
    local.copy_(torch.view_as_complex(part.contiguous()) if as_pairs else part)


def own_region(tensor: Tensor) -> Region:
    """Which part of the whole tensor this rank holds: a slice for each dim."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(low, low + n) for low, n in zip(offsets, sizes, strict=True))
