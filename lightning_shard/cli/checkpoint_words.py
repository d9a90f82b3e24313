"""What is typed after `inspect` and `export`, read before torch is imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.usage import UsageError, nearest_file

ENDS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of the file that `export` writes


def inspect_words(words: Sequence[str]) -> argparse.Namespace:
    """Read `CKPT [--trusted]`.

    Raises:
        UsageError: There is no such checkpoint.
    """
    options = _parser("inspect").parse_args(words)
    _found(options.checkpoint)
    return options


def export_words(words: Sequence[str]) -> argparse.Namespace:
    """Read `CKPT OUT [--strip PREFIX] [--trusted]`.

    Raises:
        UsageError: There is no such checkpoint, or the file to write is of no known kind.
    """
    parser = _parser("export")
    parser.add_argument("out", type=Path)
    parser.add_argument("--strip", metavar="PREFIX", default="")
    options = parser.parse_args(words)
    if options.out.suffix not in ENDS:
        raise UsageError(
            f"'{options.out}' ends with none of {', '.join(ENDS)}, which choose what is written"
        )
    if options.strip and options.out.suffix == ".ckpt":
        raise UsageError("--strip renames weights for other programs; a .ckpt keeps their names")
    if os.path.realpath(options.out) == os.path.realpath(options.checkpoint):
        raise UsageError(f"'{options.out}' is the checkpoint itself; give another name")
    _found(options.checkpoint)
    return options


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"{PROGRAM} {command}")  # its help is a page of help.py
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trusted", action="store_true")
    return parser


def _found(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise UsageError(f"there is no file '{checkpoint}'{nearest_file(checkpoint)}")
