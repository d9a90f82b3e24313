"""The same training under real launchers, and what is left when a rank dies (docs/launchers.md).

`bash tests/run_launchers` installs the launchers, which need a Debian with root, and runs these.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
import torch

from lightning_shard.processes.failures.failure import SIGTERM_CODE
from tests.processes.launchers import (
    END_S,
    WORKER,
    check,
    finish,
    needs,
    outputs,
    seconds_until_all_ended,
    seconds_until_ranks_ended,
    start,
    wait_for,
)

pytestmark = pytest.mark.slow


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, *WORKER[1:]]


CUT_TIMEOUT_S = 20.0
MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", *WORKER]
LAUNCHERS = [
    pytest.param("torchrun", torchrun("--standalone", "--nproc-per-node", "2"), id="torchrun"),
    pytest.param("lightning", [*WORKER, "--devices", "2"], id="lightning"),
    pytest.param("openmpi", MPIRUN, id="openmpi", marks=needs("mpirun.openmpi", "openmpi-bin")),
    pytest.param(
        "hydra", ["mpiexec.hydra", "-n", "2", *WORKER], id="hydra",
        marks=needs("mpiexec.hydra", "mpich"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "command"), LAUNCHERS)
def test_training(launcher, command, tmp_path):
    finish([start([*command, str(tmp_path)], tmp_path)], tmp_path)
    check(tmp_path, launcher)


@pytest.mark.parametrize(("launcher", "command"), LAUNCHERS)
def test_death_of_a_rank(launcher, command, tmp_path):
    command = [*command, str(tmp_path), "--die", "1", "--steps", "100000"]
    assert seconds_until_all_ended([start(command, tmp_path)], tmp_path) < END_S


@pytest.mark.parametrize(("launcher", "command"), LAUNCHERS)
def test_sigterm_to_the_launcher(launcher, command, tmp_path):
    """It tells its ranks, which save and end with their data workers."""
    command = [*command, str(tmp_path), "--steps", "100000", "--pause_s", "0.1", "--save"]
    run = start(command, tmp_path)
    for rank in range(2):
        wait_for(tmp_path / f"pid_{rank}")
    run.terminate()
    # torchrun and Open MPI have a status of their own
    assert run.wait(END_S) == (1 if launcher in ("torchrun", "openmpi") else SIGTERM_CODE)
    printed = outputs(tmp_path)
    assert "after SIGTERM" in printed, printed
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] > 2


@needs("mpirun.openmpi", "openmpi-bin")
def test_script_that_starts_the_process_group_itself(tmp_path):
    finish([start([*MPIRUN, str(tmp_path), "--start"], tmp_path)], tmp_path)
    check(tmp_path, "openmpi")


@contextmanager
def two_hosts():
    """Two network namespaces with a cable between them: (names, devices, address of the first)."""
    mark = os.getpid() % 10000
    names, devices = [f"ls{mark}{x}" for x in "ab"], [f"v{mark}{x}" for x in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    with ExitStack() as stack:
        for name in names:
            refused = ip("netns", "add", name).stderr
            if refused:
                pytest.skip(f"ip netns is refused here: {refused.strip()}")
            stack.callback(ip, "netns", "del", name)
        assert not ip("link", "add", devices[0], "type", "veth", "peer", devices[1]).stderr
        for host, (name, device) in enumerate(zip(names, devices, strict=True), start=1):
            for words in (
                ("link", "set", device, "netns", name),
                ("-n", name, "addr", "add", f"10.77.0.{host}/24", "dev", device),
                ("-n", name, "link", "set", device, "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ):
                assert not ip(*words).stderr, words
        yield names, devices, "10.77.0.1"


def on_two_hosts(folder, *options):
    """The commands on both, and the name and device of the second."""
    with two_hosts() as (names, devices, address):
        yield [
            start(
                ["ip", "netns", "exec", name, *torchrun(
                    "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node),
                    "--master-addr", address, "--master-port", "29512",
                ), str(folder), *options],
                folder, name=f"output_{node}", GLOO_SOCKET_IFNAME=device,
            )
            for node, (name, device) in enumerate(zip(names, devices, strict=True))
        ], names[1], devices[1]  # fmt: skip


@needs("ip", "iproute2")
def test_two_nodes(tmp_path):
    for commands, *_ in on_two_hosts(tmp_path):
        finish(commands, tmp_path)
    check(tmp_path, "torchrun", ranks=4)
    assert "is on several nodes" not in outputs(tmp_path)


@needs("ip", "iproute2")
def test_death_of_a_rank_of_two_nodes(tmp_path):
    for commands, *_ in on_two_hosts(tmp_path, "--die", "3", "--steps", "100000"):
        assert seconds_until_all_ended(commands, tmp_path, ranks=4) < END_S


@needs("ip", "iproute2")
def test_a_node_whose_link_is_cut_for_good(tmp_path):
    words = ("--steps", "100000", "--timeout_s", str(CUT_TIMEOUT_S))
    for commands, name, device in on_two_hosts(tmp_path, *words):
        for rank in range(4):
            wait_for(tmp_path / f"pid_{rank}")
        subprocess.run(["ip", "-n", name, "link", "set", device, "down"], check=True)
        (tmp_path / "died").write_text(str(time.time()))
        assert seconds_until_ranks_ended(tmp_path, 4) < CUT_TIMEOUT_S + 15
        for command in commands:  # torchrun waits for the other node
            os.killpg(command.pid, signal.SIGKILL)
            command.wait()
