"""Lets the processes that a script starts run and end as it does.

Lightning starts them by the file of the script alone, `python train.py`, without flags of Python.
"""

import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

END_S = 15.0  # for the process that started the others to end by itself, once one has failed


@contextmanager
def flags_of_python() -> Generator[None]:
    """Give the flags of this Python to those that are started while open, by their variables.

    With `-O` rank 0 alone would leave out `assert torch.isfinite(y).all()`, and its next message be
    taken for the one that the others wait for.
    """
    outside, flags = dict(os.environ), sys.flags
    if flags.ignore_environment:  # -E, -I
        for name in [name for name in outside if name.startswith("PYTHON")]:
            del os.environ[name]
    given = {
        "PYTHONOPTIMIZE": flags.optimize, "PYTHONDEVMODE": int(flags.dev_mode),
        "PYTHONUTF8": flags.utf8_mode, "PYTHONNOUSERSITE": flags.no_user_site,
        "PYTHONSAFEPATH": int(flags.safe_path), "PYTHONWARNINGS": ",".join(sys.warnoptions),
        "PYTHONDONTWRITEBYTECODE": flags.dont_write_bytecode,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in given.items() if value})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("PYTHON")]:
            del os.environ[name]
        os.environ.update({k: v for k, v in outside.items() if k.startswith("PYTHON")})


def refuse_a_program_without_a_file() -> None:
    """Refuse to start other processes where `python FILE` or `python -m NAME` would not run.

    Raises:
        RuntimeError: There is no such file or module.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None: `python FILE`
    file = Path(sys.argv[0]).absolute()
    given = {"-": "standard input", "": "standard input", "-c": "the option -c of Python"}
    if spec is None and sys.argv[0] in given:
        why = f"this one comes from {given[sys.argv[0]]}"
    elif spec is None and not file.is_file() and "hydra" not in sys.modules:  # it changes folders
        why = f"'{file}' is no file; where the folder was changed, change it after the start"
    elif spec is not None and spec.name == "__main__":
        why = f"this one is a folder or an archive, '{sys.argv[0]}'"
    else:
        return
    raise RuntimeError(
        "the processes beside this one are started by running the program's file again, but "
        f"{why}. Run it as a file, `python train.py`, or as a module, `python -m package.train`."
    )


def kill_all_if_one_fails(processes: list[Any]) -> None:
    """Kill this process and those that it has started, some time after one of them has failed.

    Lightning does it after 0 to 5 s. Here this process can say which rank failed, and save.
    """
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(1.0)
        codes = [process.poll() for process in processes]
    if any(codes):
        time.sleep(END_S)
        for number in (*(process.pid for process in processes), os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
