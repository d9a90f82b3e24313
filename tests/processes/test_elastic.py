"""torchrun starts ranks again, also on fewer nodes, and the run goes on (docs/reliability.md)."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch

import lightning_shard
from tests import pool
from tests.processes.launchers import finish, outputs, start
from tests.processes.restarted import train

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"]
SCRIPT = ["-m", "tests.processes.restarted"]
RUN_S = 400
# a node that is gone is missed after 3 s, and others are waited for 3 s more
FAST = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The weights of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forks inherit that they are errors
        lightning_shard.launch(train, {"folder": str(folder)}, processes=2)
    return torch.load(folder / "weights.pt")


CASES = {
    "kill": {"dies": "kill"},
    "exception": {"dies": "exception", "rank": "0"},
    "kill while a file is written": {"dies": "kill", "at": "write", "rank": "0"},
    "kill while a directory is written": {"dies": "kill", "at": "write", "format": "sharded"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_restart_ends_with_the_weights_of_a_quiet_run(case, quiet, tmp_path):
    config = json.dumps({"folder": str(tmp_path), **case})
    run = start([*TORCHRUN, "--standalone", "--nproc-per-node=2", *SCRIPT, config], tmp_path)
    finish([run], tmp_path)
    assert (tmp_path / "died").exists()
    found = torch.load(tmp_path / "weights.pt")
    assert found.keys() == quiet.keys()
    for name, value in quiet.items():
        assert value.equal(found[name]), name


def nodes(folder, **config):
    """An agent that stays, whose store the agents meet in, and one whose node dies."""
    port, text = pool.free_port(), json.dumps({"folder": str(folder), "dies": "node", **config})
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]
    agent = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", *meet]
    stays = start([*agent, f"--rdzv-conf={FAST},is_host=1", *SCRIPT, text], folder, "output_0")
    goes = start(
        [*agent, f"--rdzv-conf={FAST},is_host=0", *SCRIPT, text], folder, "output_1", DIES="1"
    )
    return stays, goes


@pytest.mark.slow
def test_fewer_nodes_go_on_from_the_last_checkpoint(quiet, tmp_path):
    stays, goes = nodes(tmp_path, domain="auto")
    finish([stays], tmp_path)
    assert goes.wait() == -signal.SIGKILL
    assert (tmp_path / "world").read_text() == "1"
    found = torch.load(tmp_path / "weights.pt")
    for name, value in quiet.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_domain_that_does_not_fit_fewer_nodes_is_refused(tmp_path):
    stays, goes = nodes(tmp_path, domain="2")
    try:
        assert stays.wait(RUN_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(stays.pid, signal.SIGKILL)
        raise
    assert goes.wait() == -signal.SIGKILL
    said = outputs(tmp_path)
    assert "ValueError: domain_parallel_size 2 does not divide the 1 process;" in said, said
