"""What is typed after `plan` beside the options of `fit`, read before torch is imported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_shard.cli.tool_words import SWITCH, Parser
from lightning_shard.cli.usage import UsageError, told_by_user
from lightning_shard.lab.machine import Cluster, read_cluster


@dataclass(frozen=True)
class PlanWords:
    """Where it is to run.

    Attributes:
        cluster: The machines; None: of this plan only bytes are asked for.
        best: Whether the best mesh is looked for.
        output: Where the overlay goes; None: to `trainer.default_root_dir`.
    """

    cluster: Cluster | None
    best: bool
    output: Path | None


def read_plan(words: Sequence[str]) -> tuple[PlanWords, list[str]]:
    """Read what is ours, and give the rest, which are options of `fit`.

    Raises:
        UsageError: The cluster is none, or a word lacks another.
    """
    parser = Parser("plan")
    parser.add_argument("--best", **SWITCH)
    parser.add_argument("--cluster")
    parser.add_argument("--price", type=_price)
    parser.add_argument("--output", type=Path)
    own, rest = parser.parse_known_args(words)
    if own.cluster is None:
        for name in ("best", "price", "output"):
            if getattr(own, name):
                raise UsageError(f"--{name} needs --cluster, such as --cluster 8x8xH100")
        return PlanWords(None, best=False, output=None), rest
    if own.output is not None and own.output.is_file():
        raise UsageError(f"--output '{own.output}' is a file; give a folder")
    with told_by_user(ValueError):
        return PlanWords(read_cluster(own.cluster, own.price), own.best, own.output), rest


def _price(text: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"'{text}' is no price of a device for an hour") from err
