"""A rank does not wait for a process that has started it and is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTER = """
import os, subprocess, sys, time
from lightning_shard.processes.failures.orphans import begin_to_start
begin_to_start()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(float(sys.argv[2]))
if len(sys.argv) > 3:
    os.kill(os.getpid(), int(sys.argv[3]))
child.wait()
"""
CHILD = """
import time
from lightning_shard.processes.failures.orphans import ends_with_starter
with ends_with_starter():
    time.sleep({})
print("has met", flush=True)
time.sleep({})
"""


def start(child, *arguments):
    words = [sys.executable, "-c", STARTER, child, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.quick_rows("9")
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_ends_with_its_starter(way):
    with start(CHILD.format(120, 0), 5, int(way)) as starter:
        pid = int(starter.stdout.readline())
        assert starter.wait(60) == -way
        deadline = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_running(pid)
        assert "the process that has started it ended before" in starter.stderr.read()


def test_goes_on_once_the_ranks_have_met():
    with start(CHILD.format(0.1, 120), 0) as starter:
        pid = int(starter.stdout.readline())
        assert starter.stdout.readline() == "has met\n"
        starter.kill()
        starter.wait(20)
        time.sleep(2)
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_nobody_has_started_is_left_alone():
    words = [sys.executable, "-c", CHILD.format(0.1, 0)]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "has met\n"
