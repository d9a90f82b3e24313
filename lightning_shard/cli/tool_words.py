"""What is typed after the commands that need no config, read before torch is imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.usage import UsageError, nearest, nearest_file

ENDS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of the file that `export` writes
SWITCH: dict[str, Any] = {"action": "store_true"}
WORDS: dict[str, dict[str, dict[str, Any]]] = {  # of each command, as argparse knows them
    "ops": {"name": {"nargs": "?", "default": ""}, "--markdown": SWITCH},
    "inspect": {"checkpoint": {"type": Path}, "--trusted": SWITCH},
    "export": {
        "checkpoint": {"type": Path},
        "out": {"type": Path},
        "--strip": {"metavar": "PREFIX", "default": ""},
        "--trusted": SWITCH,
    },
    "doctor": {},
    "calibrate": {
        "--output": {"type": Path, "default": Path("machine.json")},
        "--processes": {"type": int},
        "--device": {},
    },
}
PER_CORE = 16  # ranks, which more than share a core


class Parser(argparse.ArgumentParser):
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


def read_words(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Read what follows a command.

    Raises:
        UsageError: There are other words, no such checkpoint or folder, or a value that cannot be.
    """
    if words and not WORDS[command]:
        raise UsageError(f"unexpected '{words[0]}': {command} takes no options")
    parser = Parser(command)
    for name, how in WORDS[command].items():
        parser.add_argument(name, **how)
    options = parser.read(words)
    if command in _CHECKS:
        _CHECKS[command](options)
    if "checkpoint" in options and not options.checkpoint.exists():
        close = nearest_file(options.checkpoint)
        raise UsageError(f"there is no file '{options.checkpoint}'{close}")
    return options


def _check_export(options: argparse.Namespace) -> None:
    if options.out.suffix not in ENDS:
        raise UsageError(
            f"'{options.out}' ends with none of {', '.join(ENDS)}, which choose what is written"
        )
    if options.strip and options.out.suffix == ".ckpt":
        raise UsageError("--strip renames weights for other programs; a .ckpt keeps their names")
    if os.path.realpath(options.out) == os.path.realpath(options.checkpoint):
        raise UsageError(f"'{options.out}' is the checkpoint itself; give another name")


def _check_calibrate(options: argparse.Namespace) -> None:
    most = PER_CORE * (os.cpu_count() or 1)
    if options.processes is not None and not 1 <= options.processes <= most:
        raise UsageError(
            f"--processes must be from 1 to {most} on this machine; got {options.processes}"
        )
    if options.output.suffix != ".json":
        raise UsageError(
            f"--output must end with .json, by which plan knows it; got '{options.output}'"
        )
    if not options.output.absolute().parent.is_dir() or options.output.is_dir():
        raise UsageError(f"--output '{options.output}' is no file in a folder that exists")


_CHECKS = {"export": _check_export, "calibrate": _check_calibrate}
