"""What ranks on CPUs ask of Linux and glibc."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from lightning_shard.processes import cpu_settings

# blocks of 16 MiB, as many as a step of a small network frees, again and again
STEPS = """
import resource, sys
from lightning_shard.processes.cpu_settings import tune_process

def step():
    blocks = [b"x" * 2**24 for _ in range(8)]

tune_process(ranks=1)
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
        {"LIGHTNING_SHARD_CPU_SETTINGS": "0"},
    ],
    ids=["variable", "tunable", "switch"],
)
def test_limits_that_a_user_chose_are_kept(variables: dict[str, str]):
    assert pages_taken(**variables) > PAGES / 2


POLICY = """
import os
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
from lightning_shard.processes.cpu_settings import tune_process

tune_process(ranks=2)
print(os.sched_getscheduler(0) == os.SCHED_BATCH)
"""


def policy_changed(value: str) -> str:
    """What a process of two ranks, begun with Linux's usual policy, says with this switch."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.sched_setscheduler(0, 0, os.sched_param(0)){POLICY}",
        ],
        env=os.environ | {"LIGHTNING_SHARD_CPU_SETTINGS": value},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
def test_one_switch_leaves_the_process_as_it_is():
    assert policy_changed("1") == "True"
    assert policy_changed("0") == "False"
    assert "must be 0, which leaves" in policy_changed("off")


@pytest.mark.parametrize(("processes", "threads"), [(2, 4), (3, 2), (16, 1)])
def test_cores_are_shared_where_the_system_knows_no_affinity(monkeypatch, processes, threads):
    """As on macOS."""
    asked = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    cpu_settings.share_cores(processes)
    cpu_settings.share_cores(1)  # the variable is set now, and counts
    assert asked == [threads]
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


PROFILES = {
    "a measured kernel": """
from lightning_shard.lab import own_kernels
own_kernels._watched_on_cpu(lambda: torch.ones(3) + 1)
""",
    "StepProfile": """
from lightning.pytorch import LightningModule
from lightning_shard import StepProfile
own = StepProfile(wait=0)
own._begin_if_due(LightningModule())
own._drop()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_writes_nothing_to_stderr(name):
    variables = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-W", "ignore", "-c", f"import torch\n{PROFILES[name]}"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stderr == ""
