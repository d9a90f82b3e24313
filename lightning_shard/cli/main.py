"""The command line: `python -m lightning_shard COMMAND ...`.

Help, the version, and mistakes that show without a model are answered before torch is imported;
`ops`, `export`, `inspect` and `doctor` do without Lightning.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_shard.cli.certify_words import read_certify
from lightning_shard.cli.config_files import find_configs
from lightning_shard.cli.exits import exit_with
from lightning_shard.cli.help import PAGES, page
from lightning_shard.cli.plan_words import read_plan
from lightning_shard.cli.sources import ENV_PREFIX, Sources, begins_with_one_of, read_sources
from lightning_shard.cli.tool_words import WORDS as TOOLS
from lightning_shard.cli.tool_words import read_words
from lightning_shard.cli.usage import UsageError

if TYPE_CHECKING:
    from lightning_shard.cli.lightning_cli import ShardCLI as ShardCLI

LIGHTNING = ("fit", "validate", "test", "predict")
REHEARSALS = ("check", "plan", "certify")

READ_FIRST: dict[str, Callable[[Sequence[str]], tuple[Any, list[str]]]] = {
    "certify": read_certify,
    "plan": read_plan,
}


def __getattr__(name: str) -> Any:
    """Import the parser of Lightning's commands when it is used."""
    if name != "ShardCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("lightning_shard.cli.lightning_cli").ShardCLI


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: The words of the command line; those of the process if None.
    """
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else ""
    if command in ("-h", "--help", "--version"):
        print(_version() if command == "--version" else page(""))
        return
    if command in PAGES and {"-h", "--help"} & {*words[1:]}:
        if command not in LIGHTNING or words[-1] != "all":
            print(page(command))
            return
        words.pop()
    if "--traceback" in words:
        words.remove("--traceback")
        os.environ[f"{ENV_PREFIX}_TRACEBACK"] = "1"
    try:
        if command in TOOLS:
            options = read_words(command, words[1:])
            tool = importlib.import_module(f"lightning_shard.cli.{command}")
            getattr(tool, command)(options)
            return
        own = None
        if command in READ_FIRST:
            own, words[1:] = READ_FIRST[command](words[1:])
        words = find_configs(words)
        names = LIGHTNING if command[:1] in ("", "-") else (*LIGHTNING, *REHEARSALS, *TOOLS)
        given = Sources()
        if begins_with_one_of(words, names):
            given = read_sources(words[1:], command if command in LIGHTNING else "fit")
    except UsageError as err:
        exit_with(err)
    if command in REHEARSALS:
        importlib.import_module("lightning_shard.cli.rehearsal_commands").run(words, given, own)
    else:
        importlib.import_module("lightning_shard.cli.lightning_cli").run(words, given)


def _version() -> str:
    names = ("lightning-shard", "torch", "lightning")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
