"""Training whose tensors wait in files, under a limit of the process's memory."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import re, resource, sys
import torch
from lightning_shard.memory.paging.file_memory import FileMemory
from lightning_shard.memory.paging.pager import Pager

way, folder, wait = sys.argv[1:]
torch.set_num_threads(1)
MIB = 2**20


def gradient(n):
    x = torch.full((n,), 0.5, requires_grad=True)
    y = x
    for _ in range(20):
        y = y.sigmoid()  # which keeps its result
    y.sum().backward()
    return x.grad.sum().item()


gradient(64)
held = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
limit = held + 400 * MIB
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if way == "plain":
    gradient(9 * MIB)  # 20 tensors of 36 MiB
else:
    pager = Pager(torch.device("cpu"), 64 * MIB, FileMemory(folder))
    with pager.paging():
        found = gradient(9 * MIB)
        if wait == "wait":
            print("waiting", flush=True)
            while True:
                kept = [torch.rand(9 * MIB) for _ in range(8)]
    assert found > 0
    print(pager.pages.memory.peak // MIB)
"""


def start(way, folder, wait=""):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, way, str(folder), wait],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_what_does_not_fit_in_memory_waits_in_files(tmp_path):
    plain, paged = start("plain", tmp_path), start("paged", tmp_path)
    _, error = plain.communicate(timeout=100)
    assert plain.returncode
    assert "memory" in error
    printed, error = paged.communicate(timeout=100)
    assert paged.returncode == 0, error
    assert 400 < int(printed) < 800  # MiB in files
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_file_is_left_by_a_run_that_is_ended(tmp_path, number):
    paged = start("paged", tmp_path, "wait")
    assert paged.stdout.readline() == "waiting\n"
    time.sleep(0.5)
    os.kill(paged.pid, number)
    paged.communicate(timeout=60)
    assert paged.returncode
    assert [*tmp_path.iterdir()] == []
