"""Workers of pytest-xdist are forks of one process that has imported what the tests import.

Each would spend ten seconds or more on these imports, or minutes where nothing is compiled yet, and
hold the modules in memory of its own.
execnet starts `tests/forked_worker.py` in place of a Python, which hands its streams to a fork.
"""

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PR_SET_PDEATHSIG = 1  # of Linux


def fork_workers(specs: list[Any]) -> None:
    """Start the process, and have execnet ask it for the workers of these specs."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/workers"
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(address)
        line.listen()
        number = line.fileno()
        parent = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(number)],
            cwd=FOLDER.parent,
            pass_fds=[number],
        )
    atexit.register(folder.cleanup)
    atexit.register(parent.kill)
    script = [sys.executable, "-I", "-S", str(FOLDER / "forked_worker.py"), address]
    for spec in specs:
        if spec.popen:  # on this machine
            spec.python = shlex.join(script)


def imported() -> Iterator[tuple[str, list[str]]]:
    """The modules that test files import as they begin, each with the names that they take."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                yield from ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or "", [alias.name for alias in node.names]


def import_all() -> None:
    """But not the tests themselves, whose asserts pytest rewrites."""
    gc.disable()  # what is imported is no garbage
    logging.disable()  # torch says that there is no GPU
    with warnings.catch_warnings(action="ignore"):
        for module, names in imported():
            if module.partition(".")[0] not in {"tests", "xdist"}:
                with contextlib.suppress(ImportError):  # a test says what it lacks
                    found = importlib.import_module(module)
                    for name in names:
                        getattr(found, name, None)  # which imports a part of transformers
    logging.disable(logging.NOTSET)
    gc.freeze()


def serve(line: socket.socket) -> None:
    """Fork a worker for each script that comes; each gets the streams of its script."""
    import_all()
    with line:
        while True:
            asking, _ = line.accept()
            code, streams, *_ = socket.recv_fds(asking, 10_000, 3)
            if os.fork() == 0:
                break
            for number in (asking.detach(), *streams):
                os.close(number)
    work(code, streams)


def work(code: bytes, streams: list[int]) -> None:
    """Go on in a fork as `python -c code` with these standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(code, vars(main))
    atexit._run_exitfuncs()
    os._exit(0)  # to free some hundred thousand objects one by one takes seconds


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end leave nothing
    serve(socket.socket(fileno=int(sys.argv[1])))
