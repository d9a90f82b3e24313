"""Compares what the ranks of a domain have read: their parts must be of the same samples."""

import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.data.local import LocalPart
from lightning_shard.data.tree import named_leaves
from lightning_shard.processes.torch_private.internals import FakeTensor
from lightning_shard.tensor.calls import RELATIVE, some_values
from lightning_shard.tensor.tensor import DomainTensor

_PLACES = 64  # read of each entry of a batch


def check_same_batch(batch: Any, mesh: DeviceMesh) -> None:
    """Compare what the ranks of the domain have read. All of them must call this.

    Raises:
        ValueError: They have read different samples, whose parts make up no field. Or the samples
            lie otherwise in memory.
    """
    leaves = {
        "".join(f"[{key!r}]" for key in path): x
        for path, x in named_leaves(batch)
        if isinstance(x, Tensor | LocalPart)
    }
    read = {(name, "samples"): identity_of(x) for name, x in leaves.items()}
    read |= {(name, "memory"): _steps_of(x) for name, x in leaves.items()}
    found = first_difference(read, mesh)
    if found is None:
        return
    ranks, (name, what) = found
    entry = f"entry {name}" if name else "the tensor itself"
    if what == "memory":
        raise ValueError(
            f"the ranks {ranks} share each sample, but what they read lies otherwise in memory "
            f"({entry}): a view on one rank would be a copy on another. Return x.contiguous() from "
            "the dataset or the collate function, on all ranks alike."
        )
    raise ValueError(
        f"the ranks {ranks} share each sample, but read different batches ({entry}); "
        "give them the same samples in the same order and from the same files "
        "(trainer.distributed_sampler_kwargs says which replica reads what) and draw augmentations "
        "from the same seed."
    )


def check_same_after_hooks(batch: Any, mesh: DeviceMesh) -> None:
    """Compare what hooks have made of the batch on each rank of the domain; all must call this.

    Values may be rounded otherwise.

    Raises:
        ValueError: A hook has drawn other numbers on one rank.
    """
    leaves = {path: x for path, x in named_leaves(batch) if isinstance(x, Tensor)}
    own = {path: identity_of(x) for path, x in leaves.items()}
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        everywhere: list[dict[Any, tuple[Any, ...]]] = [{}] * mesh.size(axis)
        dist.all_gather_object(everywhere, own, group)
        for path in dict.fromkeys(path for each in everywhere for path in each):
            found = [each.get(path, ()) for each in everywhere]
            place = next((i for i, each in enumerate(found) if each != found[0]), 0)
            if place and not _is_rounded(leaves.get(path), found, group):
                name = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"rank {dist.get_global_rank(group, place)} has another batch {name} after "
                    "on_after_batch_transfer than the ranks with which it shares each sample; draw "
                    "augmentations by torch.rand, random or numpy.random, which these ranks share, "
                    "or seed a generator of your own alike on all ranks."
                )


def _is_rounded(x: Tensor | None, found: Sequence[tuple[Any, ...]], group: Any) -> bool:
    """Return True if the values of all ranks of the group are those of its first, but for rounding.

    Args:
        x: The values of this rank, if it has any.
        found: The answers of `identity_of` for those of each rank.
        group: The ranks.
    """
    if x is None or x.layout is not torch.strided or x.is_nested or not x.dtype.is_floating_point:
        return False
    if any(each[:2] != found[0][:2] for each in found):  # shape and dtype
        return False
    wanted = x.detach().clone()
    dist.broadcast(wanted, group=group, group_src=0)
    room = RELATIVE * torch.nan_to_num(wanted.abs(), 0, 0, 0).amax()
    is_near = ((x - wanted).abs() <= room) | (x == wanted) | (x.isnan() & wanted.isnan())
    others = (~is_near).sum().float()
    dist.all_reduce(others, group=group)
    return not others.item()


def digest_of(batch: Any, before: int = 0) -> int:
    """Return a checksum of some 64 values of each entry that is on the CPU, as loaders give it.

    Args:
        batch: A batch as it was read.
        before: The checksum of what was read before.
    """
    for _, x in named_leaves(batch):
        if isinstance(x, LocalPart):
            before = zlib.crc32(repr(x.samples).encode(), before)
        elif type(x) is Tensor and x.device.type == "cpu" and _has_rows(x):
            before = zlib.crc32(_bytes_of(some_values(x.detach(), _PLACES)), before)
    return before


def _has_rows(x: Tensor) -> bool:
    return x.layout is torch.strided and not (x.is_nested or x.is_quantized) and x.numel() > 0


def first_difference(values: Mapping[Any, Any], mesh: DeviceMesh) -> tuple[list[int], Any] | None:
    """Compare values over the ranks of each mesh axis. All ranks must call this.

    Returns:
        The ranks of the first axis that differ, and the first name whose values do.
    """
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        everywhere: list[Mapping[Any, Any]] = [{}] * mesh.size(axis)
        dist.all_gather_object(everywhere, values, group)
        for name in dict.fromkeys(name for each in everywhere for name in each):
            if any(each.get(name) != everywhere[0].get(name) for each in everywhere):
                return dist.get_process_group_ranks(group), name
    return None


def identity_of(x: Tensor | LocalPart) -> tuple[Any, ...]:
    """Return what is equal on all ranks that have the same samples: shape, dtype and a checksum."""
    if isinstance(x, LocalPart):
        return (x.shape, str(x.tensor.dtype), x.samples)
    if isinstance(x, DomainTensor | FakeTensor):  # the values of a fake one are nowhere
        return (tuple(x.shape), str(x.dtype))
    if x.is_nested:
        return (str(x.dtype), *(identity_of(each) for each in x.unbind()))
    return (tuple(x.shape), str(x.dtype), zlib.crc32(_bytes_of(x.detach().cpu())))


def _steps_of(x: Tensor | LocalPart) -> list[int] | None:
    """Return the strides of dims of several rows; None of what has none."""
    if isinstance(x, LocalPart | DomainTensor) or x.layout is not torch.strided or x.is_nested:
        return None
    return [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1]


def _bytes_of(x: Tensor) -> bytes:
    """Return what tells the values of a tensor from others of its shape and dtype."""
    if x.layout is not torch.strided or x.is_quantized:  # a sparse one has no bytes of its own
        file = io.BytesIO()
        torch.save(x, file)
        return file.getvalue()
    x = x.resolve_conj().resolve_neg()
    values = torch.view_as_real(x) if x.is_complex() else x
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
