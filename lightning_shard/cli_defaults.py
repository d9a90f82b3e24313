"""A class chosen by the user starts from its own defaults, and a value for a linked option is not dropped.

The parser keeps the arguments of a former class when the new one has them too: with a default of AdamW,
`--model.init_args.optimizer SGD` trains with AdamW's weight_decay of 0.01 (jsonargparse 4.53).
"""

from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_shard.cli_names import class_hints, find_class, parameters
from lightning_shard.cli_sources import Tree, UsageError


def own_defaults(config: Any, given: Tree, parser: Any) -> None:
    """Reset what a class chosen by the user inherited from the defaults of another one, in place.

    Args:
        config: The resolved options of one subcommand.
        given: What the user gave.
        parser: The parser of the subcommand.
    """
    _check_links(config, given, parser)
    for key, spec in list(config.items(branches=True)):
        node = given.get(key)
        if _is_spec(spec) and node is not None:
            _reset(spec, node)


def _check_links(config: Any, given: Tree, parser: Any) -> None:
    everything = yaml.safe_load(parser.dump(config, skip_none=False, skip_link_targets=False))
    kept = yaml.safe_load(parser.dump(config, skip_none=False, skip_link_targets=True))
    for key in _missing(everything, kept, ""):
        if node := given.get(key):
            raise UsageError(
                f"{key} {node.where} would be ignored: it is computed from another option; remove it"
            )


def _missing(everything: Any, kept: Any, prefix: str) -> list[str]:
    if not isinstance(everything, dict):
        return []
    found = []
    for name, value in everything.items():
        if not isinstance(kept, dict) or name not in kept:
            found.append(prefix + name)
        else:
            found += _missing(value, kept[name], f"{prefix}{name}.")
    return found


def _reset(spec: Any, node: Tree) -> None:
    cls, _ = find_class(spec["class_path"], [])
    chosen = "class_path" in node.children or isinstance(node.value, str)
    if cls is None or not chosen or "init_args" not in spec:
        return
    skip = 1 if issubclass(cls, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)) else 0
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, skip={skip} if skip else None, fail_untyped=False)
    print(parser.get_defaults(), parameters, class_hints, Namespace)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Namespace) and "class_path" in value
