"""Printing one error from one rank.

Rank 0 speaks at once. The other ranks of a mistyped command say nothing, since rank 0 saw the same
words; for a refusal while building they wait first, because it may have happened on them alone.
"""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from lightning_shard.cli_sources import ENV_PREFIX, UsageError

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
PATIENCE_S = 5.0  # launchers stop the other ranks within this time once rank 0 has failed


def is_first_rank() -> bool:
    """Whether no launcher says that this process is another one than the first."""
    return all(os.environ.get(name, "0") in ("0", "") for name in RANKS)


def exit_with(err: Exception, code: int) -> NoReturn:
    """Print `error: <sentence>` from one rank and exit on all.

    Args:
        err: What went wrong.
        code: The exit status.
    """
    if not is_first_rank():
        if isinstance(err, UsageError):
            sys.exit(code)
        time.sleep(PATIENCE_S)
    lines = [f"error: {err}" if str(err) else f"error: {type(err).__name__}"]
    if isinstance(err, UsageError):
        lines += [f"       {err.hint}"] if err.hint else []
    else:
        lines += _causes(err)
        lines.append(f"       {_raised_in(err)}; {ENV_PREFIX}_TRACEBACK=1 shows the traceback")
    prefix = "" if is_first_rank() else f"[rank {os.environ.get('RANK') or _rank()}] "
    print("\n".join(prefix + line for line in lines), file=sys.stderr)
    sys.exit(code)


def origin(err: Exception) -> Exception:
    """The error that user code raised: the parser wraps one in its own (jsonargparse 4.53)."""
    while err.__traceback__ is not None:
        inner = err.__cause__ or err.__context__
        raiser = [frame for frame, _ in traceback.walk_tb(err.__traceback__)][-1]
        parser = raiser.f_globals.get("__name__", "").startswith("jsonargparse.")
        if not parser or not isinstance(inner, Exception):
            break
        err = inner
    return err


def _rank() -> str:
    return next(os.environ[name] for name in RANKS if os.environ.get(name, "0") not in ("0", ""))


def _causes(err: BaseException) -> list[str]:
    lines, seen = [], err.__cause__
    while seen is not None:
        lines.append(f"       caused by {type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return lines


def _raised_in(err: Exception) -> str:
    code, line = [(f.f_code, n) for f, n in traceback.walk_tb(err.__traceback__)][-1]
    return f"raised in {Path(code.co_filename).name}:{line} ({code.co_qualname})"
