"""What ranks on CPUs ask of Linux and glibc."""

import os
import platform
import subprocess
import sys

import pytest

# blocks of 16 MiB, as many as a step of a small network frees, again and again
STEPS = """
import resource, sys
from lightning_shard.processes.cpu_settings import keep_freed_memory

def step():
    blocks = [b"x" * 2**24 for _ in range(8)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert "torch" not in sys.modules
"""
PAGES = 8 * 2**24 // os.sysconf("SC_PAGE_SIZE")


def pages_taken(**variables: str) -> int:
    """The pages that a process takes from Linux in its second step."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_a_step_frees_is_kept_for_the_next_one():
    assert pages_taken() < PAGES / 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=["variable", "tunable"],
)
def test_limits_that_a_user_chose_are_kept(variables: dict[str, str]):
    assert pages_taken(**variables) > PAGES / 2
