"""The command line: `python -m lightning_shard COMMAND ...`.

Help, the version, and mistakes that show without a model are answered before torch is imported;
`ops`, `export`, `inspect` and `doctor` do without Lightning.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from lightning_shard.cli.early_names import check_names
from lightning_shard.cli.help import PAGES, PROGRAM, page
from lightning_shard.cli.positions import Given, find_configs, read_given
from lightning_shard.cli.usage import ENV_PREFIX, UsageError, exit_with, shows_traceback
from lightning_shard.cli.words import BESIDE_FIT, WORDS, read_words
from lightning_shard.lightning import OLDER
from lightning_shard.processes.nearest import nearest

ROOM = "lightning_shard.cli"
LIGHTNING = ("fit", "validate", "test", "predict")
COMMANDS = (*LIGHTNING, *BESIDE_FIT, *WORDS)


def script() -> None:
    """Run a command for the script `lightning-shard`, which finds modules as `python -m` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    main()


def main(args: Sequence[str] | None = None) -> None:
    """Run one command of the command line.

    Args:
        args: The words of the command line; those of the process if None.
    """
    try:
        _run(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except BrokenPipeError:
        _end_if_nobody_reads()
        raise
    except KeyboardInterrupt:
        if shows_traceback():
            raise
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)  # as shells name a process that Ctrl-C has ended


def _end_if_nobody_reads() -> None:
    """End quietly where a program such as `head` has read enough of what is printed."""
    try:
        print(flush=True)  # Python has forgotten the text that nobody read
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        sys.exit(141)  # as shells name a process that has ended so


def _run(words: list[str]) -> None:
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
        own, given = None, Given()
        if command in (*WORDS, *BESIDE_FIT):
            own, words[1:] = read_words(command, words[1:])
        if command in WORDS:
            getattr(importlib.import_module(f"{ROOM}.{command}"), command)(own)
            return
        words = find_configs(words)
        if _is_command(words):
            under = command if command in LIGHTNING else "fit"
            given = read_given(words[1:], under)
            check_names(given, under)
    except UsageError as err:
        exit_with(err)
    _import_model([o.text for o in given.options if o.key.endswith(("model", "class_path"))])
    if command in BESIDE_FIT:
        importlib.import_module(f"{ROOM}.lab_commands").run(words, given, own)
    else:
        importlib.import_module(f"{ROOM}.lightning_cli").run(words, given)


def _import_model(paths: Sequence[str]) -> None:
    """Import what classes are in, where a program may be written for the older Lightning."""
    if find_spec(OLDER) is None:
        return
    for path in paths:
        module = path.rpartition(".")[0]
        if module and all(part.isidentifier() for part in path.split(".")):
            with suppress(Exception):  # the parser says what is wrong with a path
                importlib.import_module(module)


def _is_command(words: Sequence[str]) -> bool:
    """Check that a command comes first; return False where the parser answers, as for completion.

    Raises:
        UsageError: It is missing, unknown, or comes later.
    """
    first = words[0] if words else ""
    by_parser = f"{ENV_PREFIX}_SUBCOMMAND" in os.environ and not words
    if by_parser or first in ("--print_shtab", "--print_completion", *COMMANDS):
        return first in COMMANDS
    usage = f"{PROGRAM} {'|'.join(COMMANDS)} --config file.yaml"
    if first and first[0] != "-":
        close = nearest(first, COMMANDS, "give one of")
        raise UsageError(f"unknown subcommand '{first}'{close}", usage)
    for later in {*words} & {*COMMANDS}:
        swapped = " ".join([later, *(word for word in words if word != later)])
        said = f"the subcommand '{later}' comes first, options after it"
        raise UsageError(said, f"{PROGRAM} {swapped}")
    before = f" before '{first}'" if first else ""
    raise UsageError(f"a subcommand is missing{before}: give one of {', '.join(COMMANDS)}", usage)


def _version() -> str:
    names = ("lightning-shard", "torch", "lightning")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
