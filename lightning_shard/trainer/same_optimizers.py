"""Tells what optimizers and schedules must have in common, or the ranks would drift apart."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_SIMPLE = (bool, int, float, complex, str, type(None))


def facts_of_optimizers(optimizers: Sequence[Any]) -> dict[str, str]:
    """Name the class, the parameters and the options of each optimizer.

    Args:
        optimizers: The optimizers of one program, in its order.
    """
    facts: dict[str, str] = {}
    for number, optimizer in enumerate(optimizers):
        of = f"of optimizer {number}"
        facts[f"the class {of}"] = type(optimizer).__name__
        facts[f"the number of parameter groups {of}"] = str(len(optimizer.param_groups))
        for place, group in enumerate(optimizer.param_groups):
            of_group = f"{of} (group {place})"
            parameters = list(group["params"])
            facts[f"the number of parameters {of_group}"] = str(len(parameters))
            facts[f"the number of weights {of_group}"] = str(sum(p.numel() for p in parameters))
            facts |= _options(group, of_group)
    return facts


def facts_of_schedules(configs: Sequence[Any]) -> dict[str, str]:
    """Name the class and the options of each schedule of learning rates.

    Args:
        configs: Lightning's `LRSchedulerConfig`s.
    """
    facts: dict[str, str] = {}
    for number, config in enumerate(configs):
        of = f"of schedule {number}"
        facts[f"the class {of}"] = type(config.scheduler).__name__
        facts[f"the interval {of}"] = f"{config.frequency} {config.interval}"
        state_of = getattr(config.scheduler, "state_dict", None)
        if state_of is not None:
            facts |= _options(state_of(), of)
    return facts


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
