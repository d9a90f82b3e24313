"""The same training under real launchers, and what is left when a rank dies (docs/launchers.md).

`bash tests/run_launchers` installs the launchers, which need a Debian with root, and runs these.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKER = [sys.executable, "-m", "tests.launched"]
RUN_S, END_S = 240, 60  # on a loaded machine
WEIGHTS: list[float] = []  # of the first test that trained

pytestmark = pytest.mark.slow


def environment(**more):
    launchers = ("OMPI", "PMI", "SLURM", "MASTER", "TORCHELASTIC", "PYTEST")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(command, folder, name="output", **more):
    with (folder / name).open("w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(**more), start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def wait_for(path, seconds=RUN_S):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, outputs(path.parent)
        time.sleep(0.05)


def outputs(folder):
    return "\n".join(p.read_text() for p in sorted(folder.glob("output*")))


def finish(commands, folder):
    """Wait until all end well."""
    codes = []
    for process in commands:
        try:
            codes.append(process.wait(RUN_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            codes.append("time-out")
    assert set(codes) == {0}, f"{codes} {outputs(folder)}"


def check(folder, launcher, ranks=2, per_node=2):
    for rank in range(ranks):
        file = folder / f"rank_{rank}.json"
        wait_for(file, 20)  # Lightning's first process does not wait for the others
        process = json.loads(file.read_text())
        first = rank - rank % 2
        assert process["launcher"] == launcher
        assert (process["rank"], process["world_size"]) == (rank, ranks)
        assert (process["local_rank"], process["node"]) == (rank % per_node, rank // per_node)
        assert process["domain"] == [first, first + 1]
        assert process["total"] == ranks
        assert process["step"] == 6
        WEIGHTS.append(process["weight"])
        assert process["weight"] == pytest.approx(WEIGHTS[0], abs=1e-5)


def seconds_until_all_ended(commands, folder, ranks=2):
    """From the death of a rank, as all others and the launchers end."""
    wait_for(folder / "died")
    died = float((folder / "died").read_text())
    try:
        codes = [process.wait(END_S) for process in commands]
    finally:
        for process in commands:
            with ExitStack() as stack:
                stack.callback(process.wait)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    pids = [int((folder / f"pid_{rank}").read_text()) for rank in range(ranks)]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.time() < died + END_S, f"ranks are left: {outputs(folder)}"
        time.sleep(0.05)
    assert 0 not in codes, outputs(folder)
    seconds = time.time() - died
    print(f"all ended {seconds:.1f} s after the death of a rank")
    return seconds


def needs(program, package):
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"no {program}: apt-get install {package}"
    )


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, *WORKER[1:]]


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
        ]  # fmt: skip


@needs("ip", "iproute2")
def test_two_nodes(tmp_path):
    for commands in on_two_hosts(tmp_path):
        finish(commands, tmp_path)
    check(tmp_path, "torchrun", ranks=4)
    assert "is on several nodes" not in outputs(tmp_path)


@needs("ip", "iproute2")
def test_death_of_a_rank_of_two_nodes(tmp_path):
    for commands in on_two_hosts(tmp_path, "--die", "3", "--steps", "100000"):
        assert seconds_until_all_ended(commands, tmp_path, ranks=4) < END_S


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
