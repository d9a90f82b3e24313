"""`-n 3`: three forks of the session run its tests, each of them whole files.

The session imports and collects once, where workers of pytest-xdist would each do so again.
"""

import os
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import FDCapture
from _pytest.config import create_terminal_writer

# what is costly to begin with, and is kept by a worker, is there once
TOGETHER = {
    "fake xpu": ("tests/trainer/xpu", "tests/fake_xpu"),
    "what DTensor remembers of models on meshes": (
        "tests/trainer/test_exactness.py",
        "tests/checkpoint/test_resume",
        "tests/checkpoint/test_averages.py",
        "tests/fsdp",
    ),
}
Items = list[pytest.Item]


def add_option(parser: pytest.Parser) -> None:
    # a lower-case letter, which pytest keeps for itself
    parser.getgroup("workers")._addoption(
        "-n", "--numprocesses", type=int, default=0, dest="workers", metavar="N",
        help="Number of forks that share the tests (0: the session runs them itself)",
    )  # fmt: skip


def share_tests(session: pytest.Session, number: int) -> None:
    """Run the tests of a session in `number` forks."""
    waiting = deque(by_file(session.items))
    session.config._tmp_path_factory.getbasetemp()  # one for all
    workers: list[Worker] = []
    try:
        while waiting or any(worker.items for worker in workers):
            workers = [worker for worker in workers if worker.is_there]
            while len(workers) < number:
                workers.append(Worker(session))
            for worker in workers:
                if not worker.items and waiting:
                    worker.take(waiting.popleft())
            lines = {worker.line: worker for worker in workers if worker.items}
            for line in wait(lines):
                if left := lines[line].hear():
                    waiting.appendleft(left)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        for worker in workers:
            worker.end()
    finally:
        for worker in workers:
            worker.kill()


def by_file(items: Iterable[pytest.Item]) -> list[Items]:
    """The items of each file, and of files that go together, in the order of their first ones."""
    files: dict[str, Items] = {}
    for item in items:
        file = item.nodeid.split("::")[0]
        name = next((name for name, paths in TOGETHER.items() if file.startswith(paths)), file)
        files.setdefault(name, []).append(item)
    return list(files.values())


class Worker:
    """A fork, as the session sees it: it runs the items that it is given and tells what happens."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.items, self.is_there = session, list[pytest.Item](), True
        self.line, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self.line.close()
            _work(session, theirs)
        theirs.close()

    def take(self, items: Items) -> None:
        self.items = items
        places = {id(item): place for place, item in enumerate(self.session.items)}
        self.line.send([places[id(item)] for item in items])

    def hear(self) -> Items:
        """Hand one message to pytest; after a crash return the tests that have not begun."""
        hook = self.session.config.hook
        try:
            kind, told = self.line.recv()
        except (EOFError, ConnectionResetError):
            return self._crashed()
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=self.session.config, data=told)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=told)
        elif kind == "ended":
            item = self.items.pop(0)
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            raise RuntimeError(told)
        return []

    def _crashed(self) -> Items:
        self.is_there, self.items, (item, *left) = False, [], self.items
        _, status = os.waitpid(self.pid, 0)
        words = f"the worker ended with {os.waitstatus_to_exitcode(status)} in this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)
        return left

    def end(self) -> None:
        """Wait until it has ended its ranks."""
        self.line.send([])
        os.waitpid(self.pid, 0)
        self.is_there = False

    def kill(self) -> None:
        if self.is_there:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)


def _work(session: pytest.Session, line: "Connection[Any, Any]") -> None:
    """What the fork does, which never returns."""
    status = 1
    try:
        _alone(session.config, line)
        while places := line.recv():
            items = [session.items[place] for place in places]
            for item, following in zip(items, [*items[1:], None], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                line.send(("ended", None))
        status = 0
    except (KeyboardInterrupt, EOFError):
        status = 2  # the session has heard of Ctrl-C, too, or it is over
    except BaseException:
        line.send(("error", traceback.format_exc()))
    finally:
        if pool := sys.modules.get("tests.pool"):
            pool.close_all()
        os._exit(status)


def _alone(config: pytest.Config, line: "Connection[Any, Any]") -> None:
    """Nothing that is open is used by two processes, and what was for the terminal is sent."""
    plugins = config.pluginmanager
    manager: Any = plugins.getplugin("capturemanager")
    captured = manager._global_capturing
    for capture in (captured.out, captured.err):
        if isinstance(capture, FDCapture):  # whose file handlers of loggers may hold
            with tempfile.TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), capture.tmpfile.fileno())
    plugins.unregister(name="terminalreporter")
    plugins.register(_Silent(config), "terminalreporter")
    plugins.register(_Sender(config, line))


class _Silent:
    """In the place of the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._tw = create_terminal_writer(config, StringIO())  # which pytest asks for colours


class _Sender:
    def __init__(self, config: pytest.Config, line: "Connection[Any, Any]") -> None:
        self.config, self.line = config, line

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.line.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        was = warning_message
        sent = warnings.WarningMessage(str(was.message), was.category, was.filename, was.lineno)  # type: ignore[arg-type]
        told = {"warning_message": sent, "when": when, "nodeid": nodeid, "location": location}
        self.line.send(("warning", told))
