"""What is typed after `certify` beside the options of `fit`, read before torch is imported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_shard.cli.tool_words import SWITCH, Parser


@dataclass(frozen=True)
class CertifyWords:
    """What is to be certified.

    Attributes:
        meshes: Of each the data replicas, and the ranks along each split dim.
        steps: How many batches are trained on.
        output: Where the certificate goes; None: to `trainer.default_root_dir`.
        simulated: Whether ranks are simulated in one process.
    """

    meshes: tuple[tuple[int, ...], ...]
    steps: int
    output: Path | None
    simulated: bool


def read_certify(words: Sequence[str]) -> tuple[CertifyWords, list[str]]:
    """Read what is ours, and give the rest, which are options of `fit`.

    Raises:
        UsageError: A mesh or a number is none.
    """
    parser = Parser("certify")
    parser.add_argument("--meshes", type=_meshes, default="1x1,1x2,2x2,1x4")
    parser.add_argument("--steps", type=_steps, default=50)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--simulated", **SWITCH)
    own, rest = parser.parse_known_args(words)
    return CertifyWords(**vars(own)), rest


def _meshes(text: str) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = []
    for word in text.split(","):
        sizes = word.strip().split("x")
        if len(sizes) < 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise argparse.ArgumentTypeError(
                f"'{word}' is no mesh: data replicas x ranks of a domain, such as 2x2 or 1x2x2"
            )
        found.append(tuple(map(int, sizes)))
    return tuple(found)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of steps from 1 on")
    return int(text)
