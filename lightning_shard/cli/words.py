"""The words after commands that Lightning does not have, read before torch is imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_shard.cli.help import PROGRAM
from lightning_shard.cli.usage import UsageError, as_usage_error, nearest_file
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.processes.nearest import nearest

ENDS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # ends of a file that `export` writes
PER_CORE = 16  # ranks, which more than share a core


def whole_number(text: str) -> int:
    """Read a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 on")
    return int(text)


def meshes(text: str) -> tuple[tuple[int, ...], ...]:
    """Read meshes: the number of data replicas, then of ranks along each split dim."""
    found: list[tuple[int, ...]] = []
    for word in text.split(","):
        sizes = word.strip().split("x")
        if len(sizes) < 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise argparse.ArgumentTypeError(
                f"'{word}' is no mesh: data replicas x ranks of a domain, such as 2x2 or 1x2x2"
            )
        found.append(tuple(map(int, sizes)))
    return tuple(found)


Table = dict[str, dict[str, dict[str, Any]]]  # by command, as argparse knows them
SWITCH, PATH = {"action": "store_true"}, {"type": Path}
WORDS: Table = {
    "ops": {"name": {"nargs": "?", "default": ""}, "--markdown": SWITCH},
    "inspect": {"checkpoint": PATH, "--trusted": SWITCH},
    "export": {
        "checkpoint": PATH, "out": PATH, "--strip": {"metavar": "PREFIX", "default": ""},
        "--trusted": SWITCH,
    },
    "doctor": {},
    "calibrate": {
        "--output": {"type": Path, "default": Path("machine.json")},
        "--processes": {"type": whole_number}, "--device": {},
    },
}  # fmt: skip
BESIDE_FIT: Table = {  # commands that take the options of fit, too
    "check": {},
    "plan": {
        "--best": SWITCH, "--cluster": {}, "--measure": SWITCH, "--offload": SWITCH,
        "--price": {"type": float}, "--output": PATH,
    },
    "certify": {
        "--meshes": {"type": meshes, "default": "1x1,1x2,2x2,1x4"},
        "--steps": {"type": whole_number, "default": 50}, "--output": PATH, "--simulated": SWITCH,
    },
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser whose help is a page of help.py, and whose refusals are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError."""
        raise UsageError(message, self.format_usage().strip())


def read_words(command: str, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the words after a command, and return those that are left: options of `fit`.

    Raises:
        UsageError: There are other words, no such checkpoint or folder, or a value that cannot be.
    """
    table = {**WORDS, **BESIDE_FIT}[command]
    parser = Parser(f"{PROGRAM} {command}", add_help=False, allow_abbrev=False)
    for name, how in table.items():
        parser.add_argument(name, **how)
    options, rest = parser.parse_known_args(words)
    if rest and command in WORDS:
        known = [name for name in table if name[0] == "-"]
        close = nearest(rest[0], known, "options are") if rest[0][0] == "-" else ""
        raise UsageError(f"unexpected '{rest[0]}'{close}", parser.format_usage().strip())
    if command in CHECKS:
        CHECKS[command](options)
    if "checkpoint" in options and not options.checkpoint.exists():
        close = nearest_file(options.checkpoint)
        raise UsageError(f"there is no file '{options.checkpoint}'{close}")
    return options, rest


def _check_plan(options: argparse.Namespace) -> None:
    if options.cluster is None:
        for name in ("best", "measure", "offload", "price", "output"):
            if getattr(options, name):
                raise UsageError(f"--{name} needs --cluster, such as --cluster 8x8xH100")
        return
    if options.offload and (options.best or options.measure):
        raise UsageError(
            "--offload takes the mesh of the config and rates; leave out --best and --measure"
        )
    _make_output(options)
    with as_usage_error(ValueError):
        options.cluster = read_cluster(options.cluster, options.price)


def _make_output(options: argparse.Namespace) -> None:
    """Make the folder of --output now, before minutes of work."""
    if options.output is None:
        return
    if options.output.is_file():
        raise UsageError(f"--output '{options.output}' is a file; give a folder")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output '{options.output}' cannot be made: {error.strerror}; give another folder"
        ) from None
    if not os.access(options.output, os.W_OK):
        raise UsageError(f"--output '{options.output}' may not be written; give another folder")


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
    if (options.processes or 1) > most:
        raise UsageError(f"--processes must be from 1 to {most} here; got {options.processes}")
    if options.output.suffix != ".json":
        raise UsageError(
            f"--output must end with .json, by which plan knows it; got '{options.output}'"
        )
    if not options.output.absolute().parent.is_dir() or options.output.is_dir():
        raise UsageError(f"--output '{options.output}' is no file in a folder that exists")


CHECKS = {
    "plan": _check_plan, "certify": _make_output, "export": _check_export,
    "calibrate": _check_calibrate,
}  # fmt: skip
