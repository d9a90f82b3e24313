"""Lets the processes that a script starts run and end as it does.

Lightning starts them by the file of the script alone, `python train.py`, without flags of Python.
"""

import atexit
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

LOOK_S = 1.0
END_S = 15.0  # for the process that started the others to end by itself, once one has failed
# the others end with these at Ctrl-C and at a scheduler's end, as Popen and as shells write them
ENDED_BY_USER = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)

_started: list[Any] = []  # the processes of LOCAL_RANK 1, 2, ...


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


def watch_others(processes: list[Any]) -> None:
    """End this process, which has started others, as they end.

    Lightning kills it 0 to 5 s after one of them has failed. Here it has the time to say which rank
    failed, and to save. Once its own part is done, it waits for the others, and fails if one does.
    """
    _started.extend(processes)
    atexit.register(_wait_for_others, END_S)
    Thread(target=_end_all_if_one_fails, daemon=True).start()


@contextmanager
def own_end() -> Generator[None]:
    """Let the error of this process, or Ctrl-C, be what it ends by, whatever the others do."""
    try:
        yield
    except BaseException:
        atexit.unregister(_wait_for_others)
        raise


def _end_all_if_one_fails() -> None:
    while None in (codes := [process.poll() for process in _started]) and not any(codes):
        time.sleep(LOOK_S)
    if any(codes):
        time.sleep(END_S)
        _end(f"and this process had not ended {END_S:.0f} s later")


def _wait_for_others(within_s: float) -> None:
    """Wait until all have ended, and fail where one has failed after the part of this process."""
    last = time.monotonic() + within_s
    while running := [local for local, p in enumerate(_started, 1) if p.poll() is None]:
        if time.monotonic() > last:
            _wait_without_connections(running)
        time.sleep(0.02)
    if any(process.poll() not in (0, *ENDED_BY_USER) for process in _started):
        _end("after this process had done its part")


def _wait_without_connections(running: list[int]) -> None:
    """Go on to wait as a program that holds no connection: the others may wait for this process."""
    _say(f"This process has ended its part; it waits for LOCAL_RANK {str(running)[1:-1]}.")
    _write_out()
    for descriptor in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        if descriptor > 2:
            with suppress(OSError):  # that of the folder, which is closed
                os.set_inheritable(descriptor, False)
    words = [f"{process.pid} {process.poll()}" for process in _started]
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, *words])


class _Child:
    """Is a process that this one started before it became the program that waits."""

    def __init__(self, pid: str, code: str) -> None:
        self.pid, self._code = int(pid), None if code == "None" else int(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _end(when: str) -> None:
    """Name one that has failed, rather than one that the user has ended, and end all that run."""
    failed = [(local, code) for local, p in enumerate(_started, 1) if (code := p.poll())]
    local, code = min(failed, key=lambda each: each[1] in ENDED_BY_USER)
    way = f"exit code {code}" if code > 0 else f"signal {-code}"
    _say(f"The process of LOCAL_RANK {local} ended with {way}, {when}; look for its error above.")
    for process in _started:
        if process.poll() is None:
            process.kill()
    _write_out()
    os._exit(max(1, code))


def _say(line: str) -> None:
    with suppress(BrokenPipeError):  # nobody reads it, as after `2>&1 | head`
        print(line, file=sys.stderr, flush=True)


def _write_out() -> None:
    """Write what is printed or logged and waits in this process, as Python does at its end."""
    logging.shutdown()
    with suppress(BrokenPipeError):  # nobody reads it, as after `| head`
        sys.stdout.flush()


if __name__ == "__main__":
    _started.extend(_Child(*word.split()) for word in sys.argv[1:])
    _wait_for_others(math.inf)
