"""Forks of a session tell it all that happens, and none of its tests is lost."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.workers import TOGETHER, by_file

FILES = {
    "conftest.py": """
        from tests import workers

        def pytest_addoption(parser):
            workers.add_option(parser)

        def pytest_runtestloop(session):
            workers.share_tests(session, session.config.option.workers)
            return True
    """,
    "test_ends.py": """
        import os

        def test_before():
            pass

        def test_ends_its_process():
            os._exit(3)

        def test_after():
            pass
    """,
    "test_fails.py": """
        import logging
        import os
        import warnings
        import pytest

        log = logging.getLogger("own")
        log.addHandler(logging.StreamHandler())  # of the session's stderr

        def test_logs(capsys):
            log.warning("heard")
            assert "Logging error" not in capsys.readouterr().err

        def test_fails():
            log.warning("logged in a fork")
            print("printed in", "a fork")
            assert 1 == 2

        def test_skips():
            pytest.skip("for a reason")

        def test_warns():
            warnings.warn("of a fork")

        @pytest.fixture(scope="module")
        def folder(tmp_path_factory):
            yield tmp_path_factory.mktemp("held")
            print("the fixture ends")

        def test_fixture(folder):
            assert folder.is_dir()

        def test_subtests(subtests):
            for number in range(2):
                with subtests.test(number=number):
                    assert number
    """,
}


@pytest.fixture
def session(tmp_path):
    """Runs pytest on the files and gives its status and the lines that it prints."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(dedent(text))
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-ra", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    return run


def test_all_reports_arrive(session):
    status, text = session("-n", "2")
    assert status == 1
    assert "3 failed, 6 passed, 1 skipped, 1 warning" in text
    assert "FAILED test_ends.py::test_ends_its_process - the worker ended with 3" in text
    for words in (
        "assert 1 == 2",
        "printed in a fork",
        "for a reason",
        "of a fork",
        "SUBFAILED(number='0')",
    ):
        assert words in text, words


def test_first_failure_ends_all(session):
    status, text = session("-n", "1", "-x")
    assert status == 1
    assert "stopping after 1 failures" in text
    assert "1 failed, 1 passed" in text


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_files_are_whole_and_some_go_together():
    xpu = [f"{path}/test_a.py::test" for path in TOGETHER["fake xpu"]]
    items = [Item(name) for name in (xpu[0], "tests/test_b.py::a", xpu[1], "tests/test_b.py::b")]
    shared = [[item.nodeid for item in items] for items in by_file(items)]
    assert shared == [xpu, ["tests/test_b.py::a", "tests/test_b.py::b"]]
