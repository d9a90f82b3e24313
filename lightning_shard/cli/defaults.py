"""Defaults that depend on the machine, or on a class that the user chose.

A class chosen by the user starts from its own defaults; values for linked options are refused.

The parser keeps the arguments of a former class when the new one has them too: after AdamW,
`--model.init_args.optimizer SGD` trains with AdamW's weight_decay of 0.01 (jsonargparse 4.53).
"""

from collections.abc import Iterator
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_shard.cli.names import class_hints, find_class, parameters, parser_of
from lightning_shard.cli.sources import Sources
from lightning_shard.cli.usage import UsageError, is_mapping
from lightning_shard.processes.device import accelerators


def find_device(trainer: Any) -> None:
    """Let "auto" and "gpu" mean this machine's device where Lightning would not find it.

    Args:
        trainer: The resolved options of the trainer, changed in place.
    """
    there = [row for row in accelerators() if row.module.is_available()]
    if trainer.accelerator in ("auto", "gpu") and not all(row.found_by_lightning for row in there):
        trainer.accelerator = there[0].type


def own_defaults(config: Any, given: Sources, parser: Any) -> None:
    """Reset, in place, what a class chosen by the user inherited from another one.

    Args:
        config: The resolved options of one subcommand.
        given: What the user gave.
        parser: The parser of the subcommand.

    Raises:
        UsageError: If a value was given for an option that is computed from another one.
    """
    computed = _link_targets(config, parser)
    for key in computed:
        if place := given.place(key):
            raise UsageError(
                f"{key} {place} would be ignored: it is computed from another option; remove it"
            )
    defaults = parser.get_defaults()
    for key in ("model", "data", "trainer.strategy"):
        spec = config.get(key)
        if key in given and _is_spec(spec):
            _reset(spec, given, defaults.get(key), key, computed)


def _reset(
    spec: Any, given: Sources, former: Any, key: str, computed: list[str], skip: int = 0
) -> None:
    cls, _ = find_class(spec["class_path"], [])
    values = spec.get("init_args")
    if cls is None or not values:
        return
    own = parser_of(cls, skip)[0].get_defaults()
    same = _is_spec(former) and former["class_path"] == spec["class_path"]
    start = former.get("init_args") or own if same else own
    for name, hint in parameters(cls, skip).items():
        place = f"{key}.init_args.{name}"
        if name not in values or name not in start or place in computed:
            continue
        if place not in given:
            values[name] = start[name]
        elif _is_spec(values[name]):
            inner = max((n for _, n in class_hints(hint)), default=0)
            _reset(values[name], given, start[name], place, computed, inner)


def _link_targets(config: Any, parser: Any) -> list[str]:
    everything, kept = (
        yaml.safe_load(parser.dump(config, skip_link_targets=skip, skip_validation=True))
        for skip in (False, True)
    )
    return [*_missing(everything, kept)]


def _missing(everything: Any, kept: Any, prefix: str = "") -> Iterator[str]:
    for name, value in everything.items() if is_mapping(everything) else ():
        if not is_mapping(kept) or name not in kept:
            yield prefix + name
        else:
            yield from _missing(value, kept[name], f"{prefix}{name}.")


def _is_spec(value: Any) -> bool:
    return isinstance(value, Namespace) and "class_path" in value
