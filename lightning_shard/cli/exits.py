"""Printing one error from one rank.

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
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_shard.cli.sources import ENV_PREFIX
from lightning_shard.cli.usage import UsageError, printable
from lightning_shard.processes.attempts import end_attempts
from lightning_shard.processes.process_info import rank_variables

SAYS_ALL = (ValueError, OSError, NotImplementedError)  # whose sentences need no kind
LONGEST = 200  # characters of a cause
PATIENCE_S = 5.0  # launchers stop the other ranks within this time once rank 0 has failed


def is_first_rank() -> bool:
    """Whether no launcher says that this process is another one than the first."""
    return not _ranks()


def note(sentence: str) -> None:
    """Print a note from one rank."""
    if is_first_rank():
        print(f"note: {sentence}", file=sys.stderr)


def exit_with(err: Exception, given: Sequence[str] = ()) -> NoReturn:
    """Print `error: <sentence>` from one rank and exit on all, with 2 for a UsageError, else 1.

    Args:
        err: What went wrong.
        given: The options that it names, with their places.
    """
    code = 2 if isinstance(err, UsageError) else 1
    if code == 2:  # which another attempt would not change
        end_attempts()
    if not is_first_rank():
        if _is_on_all_ranks(err):
            sys.exit(code)
        time.sleep(PATIENCE_S)
    lines = [f"error: {_sentence(err)}"]
    if isinstance(err, UsageError):
        lines += [f"       {err.hint}"] if err.hint else []
    elif not _is_on_all_ranks(err):
        lines += [f"       {said}" for said in getattr(err, "__notes__", [])] + _causes(err)
        lines.append(f"       {_raised_in(err)}; {ENV_PREFIX}_TRACEBACK=1 shows the traceback")
        lines += [f"       {option}" for option in given]
        lines += [f"       called at {place}"] if (place := _in_code_of_the_user(err)) else []
    prefix = "" if is_first_rank() else f"[rank {os.environ.get('RANK') or _ranks()[0]}] "
    shown = [printable(line) for line in "\n".join(lines).splitlines()]
    print("\n".join(prefix + line for line in shown), file=sys.stderr)
    sys.exit(code)


def origin(err: Exception, seen: Exception | None) -> Exception:
    """The error that a constructor raised: the parser replaces it by a list of the types it tried.

    Args:
        err: What arrived.
        seen: The last error seen while building, if the chain lacks it (jsonargparse 4.53).

    Returns:
        The first error in the chain that is not the parser's own, else the one seen, else `err`.
    """
    inner: BaseException | None = err
    while isinstance(inner, Exception) and _by_parser(inner):
        inner = inner.__cause__ or inner.__context__
    return inner if isinstance(inner, Exception) else seen or err


def _sentence(err: Exception) -> str:
    """What was said, and of an error of Python or torch, such as KeyError, its kind."""
    name, said = type(err).__name__, str(err).strip()
    if isinstance(err, SAYS_ALL) or type(err).__module__ != "builtins":
        return said or name
    return f"{name}: {said}" if said else name


def _is_on_all_ranks(err: Exception) -> bool:
    """Whether every rank meets the same mistake, so that the words of one are enough."""
    return isinstance(err, UsageError) or type(err).__name__ == "DisagreementError"


def _in_code_of_the_user(err: Exception) -> str:
    """The last line of the user's own files on the way to an error that they did not raise."""
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


def _ranks() -> list[str]:
    """What launchers say of this process, if it is not the first."""
    found = [os.environ.get(name, "0") for name in rank_variables()]
    return [rank for rank in found if rank not in ("0", "")]


def _causes(err: BaseException) -> list[str]:
    """What led to it; torch's advice on files that cannot be read is left out: it is not safe."""
    lines: list[str] = []
    seen = err.__cause__
    while seen is not None and not isinstance(seen, pickle.UnpicklingError):
        if str(seen) not in str(err):  # which repeats it
            lines.append(f"       caused by {type(seen).__name__}: {_first_line(seen)}")
        seen = seen.__cause__
    return lines


def _first_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return textwrap.shorten(lines[0], LONGEST) if lines else ""


def _raised_in(err: Exception) -> str:
    code, line = [(f.f_code, n) for f, n in traceback.walk_tb(err.__traceback__)][-1]
    return f"raised in {Path(code.co_filename).name}:{line} ({code.co_qualname})"
