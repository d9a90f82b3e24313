"""Checkpoints of other strategies: names with what wrappers put into them, other keys."""

from collections.abc import Collection, Mapping
from typing import Any

# what FSDP1, activation checkpointing and torch.compile put into the names of what they wrap
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
DDP = "module."


def plain_name(name: str) -> str:
    """`name` without what wrappers put into it."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def plain_names(stored: Mapping[str, Any], wanted: Collection[str]) -> Mapping[str, Any]:
    """`stored` under the names of a module that has the names `wanted`; unknown ones stay."""
    if all(name in wanted for name in stored):
        return stored
    own = {plain_name(name): name for name in wanted}
    found = {plain_name(name): name for name in stored}
    inner = {name.removeprefix(DDP): old for name, old in found.items()}
    if sum(name in own for name in inner) > sum(name in own for name in found):
        found = inner
    return {own.get(name, name): stored[old] for name, old in found.items()}
