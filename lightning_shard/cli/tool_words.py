"""What is typed after `ops`, `inspect`, `export` and `doctor`, read before torch is imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.usage import UsageError, nearest, nearest_file

ENDS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of the file that `export` writes


class _Parser(argparse.ArgumentParser):
    """Its help is a page of help.py, and its refusals are one sentence."""

    def __init__(self, command: str) -> None:
        super().__init__(f"{PROGRAM} {command}", add_help=False, allow_abbrev=False)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_args(words)
        if unknown:
            known = [a.option_strings[0] for a in self._actions if a.option_strings]
            close = nearest(unknown[0], known, "options are") if unknown[0][0] == "-" else ""
            raise UsageError(f"unexpected '{unknown[0]}'{close}", self.format_usage().strip())
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage().strip())


def ops_words(words: Sequence[str]) -> argparse.Namespace:
    """Read `[NAME] [--markdown]`.

    Raises:
        UsageError: There are other words.
    """
    parser = _Parser("ops")
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--markdown", action="store_true")
    return parser.read(words)


def doctor_words(words: Sequence[str]) -> None:
    """Read nothing.

    Raises:
        UsageError: There is a word.
    """
    if words:
        raise UsageError(f"unexpected '{words[0]}': doctor takes no options")


def inspect_words(words: Sequence[str]) -> argparse.Namespace:
    """Read `CKPT [--trusted]`.

    Raises:
        UsageError: There are other words, or no such checkpoint.
    """
    parser = _Parser("inspect")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trusted", action="store_true")
    options = parser.read(words)
    _found(options.checkpoint)
    return options


def export_words(words: Sequence[str]) -> argparse.Namespace:
    """Read `CKPT OUT [--strip PREFIX] [--trusted]`.

    Raises:
        UsageError: There are other words, no such checkpoint, or OUT is of no known kind.
    """
    parser = _Parser("export")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--strip", metavar="PREFIX", default="")
    parser.add_argument("--trusted", action="store_true")
    options = parser.read(words)
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


def _found(checkpoint: Path) -> None:
    if not checkpoint.exists():
        raise UsageError(f"there is no file '{checkpoint}'{nearest_file(checkpoint)}")
