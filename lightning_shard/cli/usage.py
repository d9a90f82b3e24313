"""A mistake in one sentence that names the nearest valid word, said by one rank.

Rank 0 speaks at once. The other ranks of a mistyped command, and of ranks that differ from each
other, say nothing, since rank 0 says the same; for a refusal while building they wait first,
because it may have happened on them alone.
"""

import os
import pickle
import sys
import sysconfig
import textwrap
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.nearest import nearest
from lightning_shard.processes.process_info import rank_variables

ENV_PREFIX = "LIGHTNING_SHARD"
SAYS_ALL = (ValueError, OSError, NotImplementedError)  # their sentences need no kind
LONGEST = 200  # characters of a cause
PATIENCE_S = 5.0  # launchers stop the other ranks within this time once rank 0 has failed


class UsageError(LightningShardError):
    """A mistake in what the user typed: one sentence, and perhaps a hint for a second line."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.hint = hint


def shows_traceback() -> bool:
    """Return whether the variable, or `--traceback`, asks for tracebacks."""
    return os.environ.get(f"{ENV_PREFIX}_TRACEBACK", "0") not in ("", "0")


@contextmanager
def as_usage_error(*kinds: type[Exception]) -> Generator[None]:
    """Turn errors of these kinds into a UsageError with the same sentence."""
    try:
        yield
    except kinds as err:
        raise UsageError(str(err).rstrip(".")) from err


def nearest_file(path: Path, pattern: str = "*") -> str:
    """End a sentence on a missing file with the nearest name in its folder."""
    found = [file.name for file in path.parent.glob(pattern)] if path.parent.is_dir() else []
    return nearest(path.name, found, f"{path.parent} has")


def labelled(name: str, value: object) -> str:
    """Return a line of a table for a terminal."""
    return f"{name:<16}{value}"


def printable(text: str) -> str:
    """Write out characters that command a terminal; a file of a stranger may hold them."""
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def is_first_rank() -> bool:
    """Return whether this process is the first, as far as launchers have numbered it."""
    return not _rank()


def note(sentence: str) -> None:
    """Print a note from one rank."""
    if is_first_rank():
        print(f"note: {sentence}", file=sys.stderr)


def exit_with(err: Exception, given: Sequence[str] = ()) -> NoReturn:
    """Print `error: <sentence>` from one rank and exit on all, with 2 for a UsageError, else 1."""
    is_usage = isinstance(err, UsageError)
    on_all_ranks = is_usage or type(err).__name__ == "DisagreementError"
    if not is_first_rank():
        if on_all_ranks:
            sys.exit(2 if is_usage else 1)
        time.sleep(PATIENCE_S)
    lines = [f"error: {_sentence(err)}", *([err.hint] if is_usage and err.hint else [])]
    if not on_all_ranks:
        lines += [*getattr(err, "__notes__", []), *_causes(err)]
        lines += _given_by_place(err)
        lines += [f"{_raised_in(err)}; {ENV_PREFIX}_TRACEBACK=1 shows the traceback", *given]
        lines += [f"called at {place}"] if (place := _in_code_of_the_user(err)) else []
    prefix = "" if is_first_rank() else f"[rank {os.environ.get('RANK') or _rank()}] "
    shown = "\n       ".join(lines).splitlines()
    print("\n".join(prefix + printable(line) for line in shown), file=sys.stderr)
    sys.exit(2 if is_usage else 1)


def origin(err: Exception, seen: Exception | None) -> Exception:
    """Find the error that a constructor raised, which the parser replaces by its own.

    It is the first in the chain of `err` that is not the parser's own. Where the chain lacks it
    (jsonargparse 4.53), it is `seen`, the last error while building.
    """
    inner: BaseException | None = err
    while isinstance(inner, Exception) and _by_parser(inner):
        inner = inner.__cause__ or inner.__context__
    # an error that closing a file adds to another has passed no line of Python
    if isinstance(inner, Exception) and inner.__traceback__ is not None:
        return inner
    return seen or err


def _sentence(err: Exception) -> str:
    """Return the message of an error, after its kind if Python defines it, such as KeyError."""
    name, said = type(err).__name__, str(err).strip()
    if isinstance(err, SAYS_ALL) or type(err).__module__ != "builtins":
        return said or name
    return f"{name}: {said}" if said else name


def _given_by_place(err: BaseException) -> list[str]:
    """Say how to write a loader that Lightning can make anew for `predict`, if it cannot."""
    if "argument can be passed to its parent's `batch_size" not in str(err):
        return []
    return ["give the batch size by its name: DataLoader(dataset, batch_size=2)"]


def _in_code_of_the_user(err: Exception) -> str:
    """Find the last line of the user's files on the way to an error that they did not raise."""
    # the line that called is in no message (tests/cli/test_errors.py)
    frames = list(traceback.walk_tb(err.__traceback__))
    for depth, (frame, line) in enumerate(reversed(frames)):
        path = Path(frame.f_code.co_filename)
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        installed = "site-packages" in path.parts or not path.is_file()
        installed = installed or path.is_relative_to(sysconfig.get_path("stdlib"))
        if not installed and module not in ("lightning_shard", "__main__", "runpy"):
            return f"{path}:{line}" if depth else ""
    return ""


def _by_parser(err: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(err.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("jsonargparse.")


def _rank() -> str:
    """Return the rank that launchers gave this process, if it is not the first."""
    found = (os.environ.get(name, "0") for name in rank_variables())
    return next((rank for rank in found if rank not in ("0", "")), "")


def _causes(err: BaseException) -> list[str]:
    """List the causes of an error, without torch's advice on unreadable files: it is not safe."""
    lines: list[str] = []
    seen = err.__cause__
    while seen is not None and not isinstance(seen, pickle.UnpicklingError):
        first = (str(seen).strip().splitlines() or [""])[0]
        if not first or first not in str(err):  # often one repeats the other
            shown = textwrap.shorten(first, LONGEST)
            lines.append(f"caused by {type(seen).__name__}: {shown}")
        seen = seen.__cause__
    return lines


def _raised_in(err: Exception) -> str:
    code, line = [(f.f_code, n) for f, n in traceback.walk_tb(err.__traceback__)][-1]
    return f"raised in {Path(code.co_filename).name}:{line} ({code.co_qualname})"
