"""Tells what optimizers and schedules must have in common, or the ranks would drift apart."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.processes.agreement import DisagreementError

_SIMPLE = (bool, int, float, complex, str, type(None))


def facts_of_optimizers(optimizers: Sequence[Any]) -> dict[str, str]:
    """Name the class, the parameters and the options of each optimizer."""
    facts: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        of = f"of optimizer {number}"
        facts[f"the class {of}"] = type(optimizer).__name__
        facts[f"the number of parameter groups {of}"] = str(len(optimizer.param_groups))
        for place, group in enumerate(optimizer.param_groups):
            of_group = f"{of} (group {group.get('name', place)!r})"
            parameters = list(group["params"])
            facts[f"the number of parameters {of_group}"] = str(len(parameters))
            facts[f"the number of weights {of_group}"] = str(sum(p.numel() for p in parameters))
            facts |= _options(group, of_group)
    return facts


def facts_of_schedules(configs: Sequence[Any]) -> dict[str, str]:
    """Name the class and the options of each schedule of learning rates."""
    facts: dict[str, str] = {}
    for number, config in enumerate(configs):
        of = f"of schedule {number}"
        facts[f"the class {of}"] = type(config.scheduler).__name__
        facts[f"the interval {of}"] = f"{config.frequency} {config.interval}"
        state_of = getattr(config.scheduler, "state_dict", None)
        if state_of is not None:
            facts |= _options(state_of(), of)
    return facts


def digest_of_optimizers(optimizers: Sequence[Any]) -> Tensor:
    """Return a number that stands for `facts_of_optimizers`."""
    facts = repr(facts_of_optimizers(optimizers))
    return torch.tensor(zlib.crc32(facts.encode()) - 2**31, dtype=torch.int32, device="cpu")


def refuse_other_optimizers(
    digests: Sequence[int], optimizers: Sequence[Any], group: dist.ProcessGroup
) -> None:
    """Raise on all ranks of a group if their optimizers have come to differ in a training.

    Raises:
        DisagreementError: Two ranks differ.
    """
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    facts: list[Any] = [None] * len(digests)
    dist.all_gather_object(facts, facts_of_optimizers(optimizers), group=group)
    first, second = facts[0], facts[other]
    name = next(name for name in [*first, *second] if first.get(name) != second.get(name))
    raise DisagreementError(
        f"{name} is {first.get(name)} on rank 0 and {second.get(name)} on rank {other}, which "
        "were equal as the training began, so the weights of these ranks have drifted apart; let "
        "hooks and callbacks change it on all ranks alike."
    )


def _options(values: Mapping[Any, Any], of: str) -> dict[str, str]:
    # schedules write the initial rate, and are compared themselves
    kept = {name: v for name, v in values.items() if name not in ("params", "initial_lr")}
    return simple_values(kept, lambda name: f"{name} {of}")


def simple_values(values: Mapping[Any, Any], named: Callable[[Any], str]) -> dict[str, str]:
    """Describe the values that are numbers, words, or short lists of them.

    Args:
        values: Values of any kind, by name; names that begin with "_" are left out.
        named: Gives a name for the description.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            value = value.item() if value.numel() == 1 and not value.is_meta else None
        listed: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(each, _SIMPLE) for each in listed) and not str(name).startswith("_"):
            found[named(name)] = str(value)
    return found
