"""Tells modules that are prepared for several ranks, and so can be no part of a checkpoint.

torch pickles a module by the name of its class and with its hooks. The classes and hooks that FSDP2
and this package give a module have no names, and what it holds is one rank's shard.
"""

import pickle
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_shard.checkpoint.stored import tensors_in
from lightning_shard.processes.narrow import is_dict, is_list
from lightning_shard.processes.torch_private.internals import own_parameters
from lightning_shard.tensor.mixins import own_class
from lightning_shard.tensor.placement import is_field

_OURS = ("torch.distributed.", f"{__name__.partition('.')[0]}.")


class _WholeTensors(pickle.Pickler):
    """Refuses shards: a pickle of one holds the rows of one rank, and looks whole."""

    @override
    def reducer_override(self, obj: Any, /) -> Any:
        """Refuse a shard; leave all else to pickle."""
        if isinstance(obj, DTensor):
            raise TypeError(
                "a checkpoint cannot hold an object with sharded tensors in it, such as an "
                "optimizer: put its state_dict() into it, or keep parameters whole with "
                "sharding='none'."
            )
        return NotImplemented


def save_whole(content: Any, file: IO[bytes]) -> None:
    """Write what torch.load reads; shards in it must have been gathered.

    Raises:
        TypeError: An object in it holds shards.
    """
    torch.save(content, file, pickle_module=SimpleNamespace(Pickler=_WholeTensors, __name__="ours"))


def holds_prepared(value: Any) -> bool:
    """Return True if such a module is among nested dicts, lists and tuples."""
    if is_dict(value) or is_list(value):
        return any(map(holds_prepared, value.values() if is_dict(value) else value))
    return is_prepared(value)


def is_prepared(value: Any) -> bool:
    """Return True for a module of which a part has a class or hooks of ours, or holds shards."""
    return isinstance(value, nn.Module) and any(
        _is_changed(part)
        or any(isinstance(p, DTensor) for p in own_parameters(part).values())
        or any(is_field(x) for x in tensors_in(vars(part)))
        or (part is not value and reattached(part))
        for part in value.modules()
    )


def reattached(value: Any) -> set[str]:
    """Name the methods of a prepared module that Lightning attaches to a callback in each run."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    owners = {name: getattr(held.get(name), "__self__", None) for name in ("log", "log_dict")}
    return {
        name
        for name, owner in owners.items()
        if isinstance(owner, nn.Module) and _is_changed(owner)
    }


def _is_changed(module: nn.Module) -> bool:
    """Return True if this package or FSDP2 gave the module a class or hooks."""
    held = [v for key, v in vars(module).items() if "_hook" in key and isinstance(v, dict)]
    hooks = [hook for numbered in held for hook in numbered.values()]
    return own_class(module) is not type(module) or any(map(_is_ours, hooks))


def _is_ours(hook: Any) -> bool:
    inner: Any = getattr(hook, "hook", hook)  # hooks of state dicts are wrapped
    inner = getattr(inner, "func", inner)
    return str(getattr(inner, "__module__", "")).startswith(_OURS)
