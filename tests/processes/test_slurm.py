"""The same training under SLURM, on one node, with a job that is queued again.

`bash tests/run_launchers` installs SLURM, which needs a Debian with root, and runs these.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.processes.launchers import (
    END_S,
    ROOT,
    RUN_S,
    WORKER,
    check,
    environment,
    outputs,
    wait_for,
)

pytestmark = pytest.mark.slow

SLURM_CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --overcommit
#SBATCH --requeue --open-mode=append --output={folder}/output
srun --kill-on-bad-exit=1 {command}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs SLURM's commands with a cluster of this machine; (name, *words) to what it prints."""
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install munge slurm-wlm")
    if os.getuid():
        pytest.skip("SLURM is started by root")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    port = 20000 + os.getpid() % 10000
    conf, key = folder / "slurm.conf", folder / "munge.key"
    host = socket.gethostname().split(".")[0]
    conf.write_text(SLURM_CONF.format(host=host, folder=folder, port=port, node_port=port + 1))
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    files = ("socket", "pid-file", "log-file", "seed-file")
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}"]
        + [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in files],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    ]
    variables = environment(SLURM_CONF=str(conf))

    def run(*words):
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    started = []
    try:
        for words in daemons:
            with (folder / "daemons.log").open("a") as file:
                started.append(subprocess.Popen(words, env=variables, stderr=file))
            if words[0] == "munged":
                wait_for(folder / "munge.socket", 20)
        deadline = time.monotonic() + 60
        while " idle" not in (state := run("sinfo", "-h", "-o", "%P %t")):
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-1500:] for p in folder.glob("*.log"))
                pytest.fail(f"SLURM does not start: {state}\n{logs}")
            time.sleep(0.5)
        yield run
    finally:
        run("scancel", "--user=root")
        time.sleep(1)
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(20)


def submit(slurm, folder, *options):
    script = folder / "job.sh"
    command = " ".join([*WORKER, str(folder), *options])
    script.write_text(JOB.format(folder=folder, command=command))
    said = slurm("sbatch", f"--chdir={ROOT}", "--export=ALL", str(script))
    assert "Submitted batch job" in said, said
    return said.split()[-1]


def state_of(slurm, job):
    return (re.search(r"JobState=(\w+)", slurm("scontrol", "show", "job", job)) or ["", ""])[1]


def wait_for_end(slurm, job, folder, seconds=RUN_S):
    deadline = time.monotonic() + seconds
    while (state := state_of(slurm, job)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < deadline, f"{state} {outputs(folder)}"
        time.sleep(0.2)
    return state


def test_slurm(slurm, tmp_path):
    job = submit(slurm, tmp_path)
    assert wait_for_end(slurm, job, tmp_path) == "COMPLETED", outputs(tmp_path)
    check(tmp_path, "slurm")


def test_slurm_death_of_a_rank(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--die", "1", "--steps", "100000")
    wait_for(tmp_path / "died")
    died = float((tmp_path / "died").read_text())
    assert wait_for_end(slurm, job, tmp_path, END_S) == "FAILED", outputs(tmp_path)
    print(f"all ended {time.time() - died:.1f} s after the death of a rank")
    for rank in range(2):
        assert not Path(f"/proc/{(tmp_path / f'pid_{rank}').read_text()}").exists()


def test_slurm_requeued_job_resumes(slurm, tmp_path):
    job = submit(slurm, tmp_path, "--steps", "60", "--pause_s", "0.3")
    wait_for(tmp_path / "pid_1")
    slurm("scancel", "--signal=USR1", job)
    assert wait_for_end(slurm, job, tmp_path) == "COMPLETED", outputs(tmp_path)
    found = json.loads((tmp_path / "rank_0.json").read_text())
    assert found["step"] == 60
    assert found["first"] > 3, f"it begins anew: {outputs(tmp_path)}"
    assert "Restored all states from the checkpoint" in outputs(tmp_path)


def test_slurm_cancels_a_job_that_saves(slurm, tmp_path):
    """It sends SIGTERM to all processes of the job, and SIGKILL 5 s later."""
    job = submit(slurm, tmp_path, "--steps", "100000", "--pause_s", "0.1", "--save")
    wait_for(tmp_path / "pid_1")
    slurm("scancel", job)
    assert wait_for_end(slurm, job, tmp_path, END_S) == "CANCELLED", outputs(tmp_path)
    assert "after SIGTERM" in outputs(tmp_path), outputs(tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] > 2
