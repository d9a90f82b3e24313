"""Saves the weights of a module that may be sharded, and loads weights into it.

Each rank reads its part, and a tensor is read when it is used.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.directory import is_sharded, read_weights
from lightning_shard.checkpoint.foreign import plain_names, refuse_other_weights, weights_of
from lightning_shard.checkpoint.pretrained import file_in, pretrained_names
from lightning_shard.checkpoint.safetensors_file import (
    SAFETENSORS,
    in_order,
    read_safetensors,
    write_safetensors,
)
from lightning_shard.checkpoint.state import full
from lightning_shard.checkpoint.stored import StoredState, StoredTensor, bytes_of, own_region
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.data.atomic import written_file
from lightning_shard.fsdp.complex_pairs import pair_names
from lightning_shard.fsdp.parallelize import SHARDED_OVER
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.arguments import check_module
from lightning_shard.processes.errors_together import together
from lightning_shard.processes.mesh import flat_mesh

TORCH = (".pt", ".pth", ".bin")
PART_BYTES = 2**28  # a state is read from disk in such parts
_SHOWN_LINES = 4  # the most of an error that names each weight


def save_weights(module: nn.Module, path: str | Path) -> None:
    """Write the weights of `module` under the names, shapes and dtypes of the unsharded module.

    All ranks call it. Each parameter is gathered in turn and rank 0 writes, so no other rank holds
    more than one whole parameter. Neither does rank 0 for safetensors; the other formats are
    written from CPU memory of rank 0. Complex weights that are stored as pairs are complex again.
    The file has a checksum, with which `load_weights` compares it.

    Args:
        module: An ordinary module, or one that `parallelize`, `fully_shard` or a strategy sharded.
        path: Ends with `.safetensors`, `.pt`, `.pth` or `.bin` (a state dict), or `.ckpt` (a
            Lightning checkpoint of weights alone). What has the name is replaced; where that is a
            symbolic link, the file that it points to.

    Raises:
        ValueError: The path ends otherwise, or the format has no numbers of some dtype.
        OSError: It cannot be written; what was there before stays. Other ranks raise a
            RuntimeError that says so.
    """
    check_module(module, "save_weights")
    path = Path(path)
    if path.suffix not in (*TORCH, ".ckpt", ".safetensors"):
        raise ValueError(
            f"'{path}' ends with none of .safetensors, {', '.join(TORCH)} and .ckpt, which choose "
            "the format."
        )
    state = module.state_dict()
    for name in [name for name, value in state.items() if not _is_weight(name, value)]:
        del state[name]  # neuralop adds the arguments of its model, with functions among them
    if path.suffix == ".safetensors":
        state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        state = {name: state[name] for name in in_order(state, _dtypes(state))}
    first = not dist.is_initialized() or dist.get_rank() == 0
    parts = ((name, full(value, keep=first)) for name, value in state.items())

    def write() -> None:
        try:
            if first:
                with written_file(path.resolve()) as file:
                    _write(file, path.suffix, state, parts)
        finally:  # the others gather to the end, also when this rank cannot write
            for _ in parts:
                pass

    together(write) if dist.is_initialized() else write()


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) or name.endswith("_extra_state")


def _dtypes(state: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in state.items()}


def _write(
    file: IO[bytes], ending: str, state: dict[str, Any], parts: Iterator[tuple[str, Any]]
) -> None:
    if ending == ".safetensors":
        shapes = {name: tensor.shape for name, tensor in state.items()}
        write_safetensors(file, shapes, _dtypes(state), (tensor for _, tensor in parts))
        return
    weights = copy.copy(state)  # the class stays: a state dict keeps the versions of its modules
    weights.update(parts)
    version_key = {"pytorch-lightning_version": version("lightning")}
    torch.save(version_key | {"state_dict": weights} if ending == ".ckpt" else weights, file)


def load_weights(module: nn.Module, path: str | Path, *, strict: bool = True) -> None:
    """Copy the weights in a file into `module`, one tensor at a time, on any mesh.

    No rank reads more than its shard of a sharded parameter, so each rank must see the file. All
    ranks call it for a module of `parallelize`; they compare what they found, and an error of one
    is raised on all. What wrappers put into names is understood (`module.` of DDP,
    `_fsdp_wrapped_module.`, `_orig_mod.`).

    Args:
        module: An ordinary module, or one that `parallelize` or `fully_shard` sharded; its tensors
            have memory (`module.to_empty(device=...)` gives it to those of the meta device).
        path: A safetensors file, the index of several (`*.safetensors.index.json`), or a file of
            `torch.save`: a state dict, or a Lightning checkpoint; or a directory of
            torch.distributed.checkpoint, ours or Lightning's; or a folder of `save_pretrained` of
            transformers or diffusers, whose old names become those of the module.
        strict: True requires that the names in the file are those of the module.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not whole, of another kind, would run code, or its tensors have other
            shapes.
        RuntimeError: `strict`, and names are missing or unknown; or a parameter has no memory.
        DisagreementError: The ranks found different weights.
    """
    check_module(module, "load_weights")
    if (mesh := module.__dict__.get(SHARDED_OVER)) is not None:
        load_weights_together(module, path, flat_mesh(mesh).get_group(), strict=strict)
    else:
        copy_weights(module, stored_weights(path), f"'{path}'", strict=strict)


def load_weights_together(
    module: nn.Module,
    path: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    strict: bool = True,
) -> None:
    """Load as `load_weights` on all ranks of `group`, which must find the same weights.

    Raises:
        DisagreementError: They differ in a name, a shape, a dtype or the first number of a tensor.
        RuntimeError: Another rank failed; on this rank its own error is raised, as `load_weights`
            says.
    """
    stored: dict[str, Any] = {}
    seen: list[str] = []

    def find() -> None:
        stored.update(stored_weights(path))
        seen.append(_identity(stored))

    together(find, group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, seen[0], group=group)
    if differing := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise DisagreementError(
            f"the weights in '{path}' are others on rank {differing[0]} than on rank 0, and each "
            "rank reads a part of them; give all ranks the same files."
        )
    together(lambda: copy_weights(module, stored, f"'{path}'", strict=strict), group)


@torch.no_grad()
def copy_weights(
    module: nn.Module, stored: Mapping[str, Any], origin: str, *, strict: bool = True
) -> None:
    """Copy weights into `module`, one tensor at a time, each rank its own part.

    Args:
        module: An ordinary module, or one that is sharded.
        stored: Weights by name; tensors, or `StoredTensor`s, of which only parts are read.
        origin: The place that they come from, for messages.
        strict: True requires that the names are those of the module.

    Raises:
        ValueError: A tensor has another shape, or is complex and the module's is not.
        RuntimeError: `strict`, and names are missing or unknown; or a parameter has no memory.
    """
    targets = module.state_dict(keep_vars=True)
    pairs = pair_names(module)
    stored = pretrained_names(plain_names(stored, targets), module, targets, origin)
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


def _identity(stored: Mapping[str, Any]) -> str:
    """A digest of names, shapes, dtypes and first numbers: nobody reads all of a large file."""
    seen = hashlib.sha256()
    for name, value in sorted(stored.items()):
        seen.update(name.encode())
        if isinstance(value, StoredTensor):
            first = value.read(tuple(slice(0, 1) for _ in value.shape))
            seen.update(f"{tuple(value.shape)} {value.dtype} {first.tolist()}".encode())
    return seen.hexdigest()


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
    return ", ".join(f"{name!r}" for name in names[:5]) + more


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
    if _counts(source.dtype) != _counts(local.dtype):
        raise ValueError(
            f"'{name}' in {origin} is {source.dtype}, the module's is {local.dtype}: numbers of "
            "another kind, as of quantized weights. Build the module as it was saved."
        )
    region = own_region(target)[: len(shape)]
    if as_pairs:
        region = (*region, slice(0, 2))
    part = source.read(region) if isinstance(source, StoredTensor) else source[region]
    local.copy_(torch.view_as_complex(part.contiguous()) if as_pairs else part)


def _counts(dtype: torch.dtype) -> bool:
    """Return True for integers and truth values, which stand for other numbers than floats."""
    return not (dtype.is_floating_point or dtype.is_complex)


def stored_weights(path: str | Path) -> dict[str, Any]:
    """Read weights by name: `StoredTensor`s, and entries that are no tensors as they are.

    Args:
        path: A safetensors file, the index of several (`*.safetensors.index.json`), or a file of
            `torch.save`: a state dict, or a Lightning checkpoint; or a directory of
            torch.distributed.checkpoint, or a folder of `save_pretrained`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not whole, of another kind, or holds objects that would run code.
    """
    path = Path(path)
    if is_sharded(path):
        stored = read_weights(path)
        refuse_other_weights(stored, path)
        return stored
    if path.is_dir():
        path = file_in(path)
    if path.name.endswith(SAFETENSORS):
        return dict(read_safetensors(path))
    weights = weights_of(read_torch_file(path), path)
    return {k: _in_memory(v) if isinstance(v, Tensor) else v for k, v in weights.items()}


def _in_memory(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tensor.shape, tensor.dtype, lambda region: tensor[region])


def does_not_fit(module: nn.Module, saved: Any, err: Exception) -> str:
    """Say that the weights of a checkpoint do not fit, with both classes and what differs.

    Args:
        module: The LightningModule that is to be loaded.
        saved: The hyperparameters of the checkpoint.
        err: The error of torch, which names each weight in a line.
    """
    saved = dict(saved) if isinstance(saved, Mapping) else {}
    own = dict(getattr(module, "hparams", {}))
    kind = next(c for c in type(module).__mro__ if not c.__module__.startswith("lightning_shard."))
    differ = {name: (saved[name], own[name]) for name in saved if name in own}
    differ = {name: both for name, both in differ.items() if repr(both[0]) != repr(both[1])}
    theirs, ours = (
        f" with {', '.join(f'{name}={both[n]!r:.60}' for name, both in differ.items())}"
        if differ else "" for n in (0, 1)
    )  # fmt: skip
    named, path = kind.__qualname__, saved.get("_class_path")
    of = f"is of {str(path).rpartition('.')[2]}" if path else "was saved" if theirs else ""
    lines = str(err).splitlines()
    if (more := len(lines) - _SHOWN_LINES) > 1:
        lines[_SHOWN_LINES:] = [f"\tand {more} lines more."]
    return f"{of}{theirs}{', and ' if of else ''}does not fit {named}{ours}: " + "\n".join(lines)


def load_module_state(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load as `module.load_state_dict`, a part of the state at a time if it is not read yet.

    Raises:
        RuntimeError: `strict`, and names are missing or unknown; or shapes differ.
    """
    if not isinstance(state, StoredState):
        module.load_state_dict(state, strict=strict)
        return
    if isinstance(module, FSDPModule):
        copy_weights(module, state.stored, "the checkpoint", strict=strict)
        return
    missing: set[str] = set(module.state_dict())
    unknown: set[str] = set()
    for part in _parts(state):
        keys: Any = module.load_state_dict(part, strict=False)
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
