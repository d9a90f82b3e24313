"""`python -m lightning_shard check|plan --config a.yaml`: a training step, rehearsed here.

`check` trains one step in one process and on two ranks that share each sample, compares them, and
names the functions that have no rule; it exits with 1 if the module cannot train so. `plan`
predicts what each of the ranks that the config asks for will hold and send. Both run on the CPU,
take the options of `fit`, and use its model and the first batch of its data.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_shard.check import check
from lightning_shard.cli.sources import UsageError, read_sources
from lightning_shard.plan import plan

COMMANDS = ("check", "plan")
# of the process that reads the config: what it asks for may not be here
HERE = {"accelerator": "cpu", "devices": "1", "num_nodes": "1", "logger": "false"}
SIZES = {"domain_parallel_size": "1", "data_parallel_size": "auto", "sharding": "full"}


@dataclass(frozen=True)
class Wanted:
    """What the config asks for.

    Attributes:
        processes: Of all nodes; 0 where it does not say a number.
        domain: Ranks along each split dim.
        shard_dims: Of the strategy.
        trainer: Arguments of the Trainer that change the step.
    """

    processes: int
    domain: tuple[int, ...]
    shard_dims: Any
    trainer: dict[str, Any]


def words_of_fit(words: Sequence[str]) -> list[str]:
    """The words with which `fit` builds model and data on any machine."""
    strategy = read_sources(words, "fit").get("trainer.strategy.init_args")
    sizes = {k: v for k, v in SIZES.items() if strategy is not None and k in strategy.children}
    options = [f"--trainer.{k}={v}" for k, v in HERE.items()]
    return [
        "fit",
        *words,
        *options,
        *(f"--trainer.strategy.init_args.{k}={v}" for k, v in sizes.items()),
    ]


def wanted(words: Sequence[str]) -> Wanted:
    """Read from the same sources what `words_of_fit` replaces.

    Raises:
        UsageError: A size is not a whole number.
    """
    tree = read_sources(words, "fit")

    def given(name: str, default: Any) -> Any:
        node = tree.get(f"trainer.{name}")
        return default if node is None else node.plain()

    strategy = given("strategy", {})
    options = strategy.get("init_args", strategy) if isinstance(strategy, dict) else {}
    sizes = options.get("domain_parallel_size", 1)
    domain = tuple(sizes) if isinstance(sizes, list) else (sizes,)
    devices, nodes = given("devices", "auto"), given("num_nodes", 1)
    devices = len(devices) if isinstance(devices, list) else devices
    for name, size in (*(("domain_parallel_size", d) for d in domain), ("num_nodes", nodes)):
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} must be a whole number from 1 on; got {size!r}")
    processes = devices * nodes if isinstance(devices, int) and devices > 0 else 0
    precision = given("precision", None)
    trainer = {} if precision is None else {"precision": precision}
    return Wanted(processes, domain, options.get("shard_dims"), trainer)


def rehearse(
    command: str, module: LightningModule, data: LightningDataModule | None, asked: Wanted
) -> None:
    """Print what was found; `check` exits with 1 if the module cannot train so."""
    source: Any = data or module.train_dataloader()
    ranks = math.prod(asked.domain)
    if command == "plan":
        processes = asked.processes or ranks
        print(plan(module, source, processes, asked.domain, asked.shard_dims, **asked.trainer))
        return
    small = tuple(min(size, 2) for size in asked.domain) if ranks > 1 else (2,)
    found = check(module, source, small, asked.shard_dims, **asked.trainer)
    print(found)
    if not found.is_supported:
        sys.exit(1)
