"""Copies a sharded module as one process has it: for modules that a checkpoint holds as such.

As those that `save_hyperparameters` keeps. torch pickles a module by the name of its class, and
those that FSDP2 and this package make have none.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.fsdp.complex_pairs import as_complex
from lightning_shard.processes.torch_private.internals import own_parameters
from lightning_shard.tensor.mixins import own_class
from lightning_shard.tensor.tensor import DomainTensor

_OURS = ("torch.distributed.", f"{__name__.partition('.')[0]}.")
# how attributes begin in which torch keeps that a module is sharded
_TORCH = ("__composable_api", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def is_changed(module: nn.Module) -> bool:
    """Return True if any part of the module has a class or hooks of ours, or holds shards."""
    return any(
        _is_prepared(part)
        or any(isinstance(p, DTensor) for p in own_parameters(part).values())
        or any(map(_holds_split, vars(part).values()))
        or reattached(part)
        for part in module.modules()
    )


def _holds_split(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_split, value.values()))
    return isinstance(value, DomainTensor) or (
        isinstance(value, list | tuple) and any(map(_holds_split, value))
    )


def reattached(value: Any) -> set[str]:
    """Name the methods of a sharded module that Lightning attaches to a callback in each run."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    owners = {name: getattr(held.get(name), "__self__", None) for name in ("log", "log_dict")}
    return {
        name
        for name, owner in owners.items()
        if isinstance(owner, nn.Module) and _is_prepared(owner)
    }


def _is_prepared(module: nn.Module) -> bool:
    """Return True if this package or FSDP2 gave the module a class or hooks."""
    return own_class(module)[0] is not type(module) or bool(_own_hooks(vars(module)))


def plain_copy(module: nn.Module, full: Callable[[Any], Any]) -> nn.Module:
    """Copy a module with the classes, parameters and hooks that it has in one process.

    All ranks call it, since the tensors are gathered one after the other.

    Args:
        module: The module, outside of its steps.
        full: Gathers the tensors in nested dicts, lists and tuples; None where they are not kept.
    """
    copied = _Copy(full)
    for part in module.modules():
        pairs = vars(part).get("_pairs", ())
        for name, p in own_parameters(part).items():
            copied.take(p, name in pairs)
    return copied.of(module)


class _Copy:
    """A copy of a module, whose parts and parameters stay shared where they are."""

    def __init__(self, full: Callable[[Any], Any]) -> None:
        self._full = full
        self._made: dict[int, Any] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]
        cls, mixed_in = own_class(module)
        result = self._made[id(module)] = object.__new__(cls)
        held = vars(module)
        ours, left_out = _own_hooks(held), mixed_in | reattached(module)
        for key, value in held.items():
            if key in left_out or key.startswith(_TORCH):
                continue
            if "_hook" in key and isinstance(value, dict):
                value = type(value)((n, hook) for n, hook in value.items() if n not in ours)
            vars(result)[key] = self._attribute(value)
        return result

    def take(self, p: Tensor | None, is_pairs: bool) -> None:
        """Gather a parameter of the module, once."""
        if p is not None and id(p) not in self._made:
            whole = self._full(as_complex(p.detach()) if is_pairs else p)
            if isinstance(whole, Tensor) and whole is not p:
                whole = nn.Parameter(whole, p.requires_grad)
            self._made[id(p)] = whole

    def _attribute(self, value: Any) -> Any:
        """Copy an attribute, such as a list of parameters or of parts, or what a hook's dict is."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, dict):
            kept = copy.copy(value)
            kept.update((key, self._attribute(v)) for key, v in value.items())
            return kept
        if type(value) in (list, tuple):
            return type(value)(map(self._attribute, value))
        return self._full(value)


def _own_hooks(held: dict[str, Any]) -> set[int]:
    """Find the numbers of a module's hooks that FSDP2 or this package registered."""
    numbers = set[int]()
    for hooks in (v for key, v in held.items() if "_hook" in key and isinstance(v, dict)):
        for number, hook in hooks.items():
            inner: Any = getattr(hook, "hook", hook)  # hooks of state dicts are wrapped
            inner = getattr(inner, "func", inner)
            if str(getattr(inner, "__module__", "")).startswith(_OURS):
                numbers.add(number)
    return numbers
