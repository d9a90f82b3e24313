"""Starting `tests.launched` under a launcher, and what is asked of its ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "tests.processes.launched"]
RUN_S, END_S = 240, 60  # on a loaded machine
WEIGHTS: list[float] = []  # of the first test that trained


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
    try:
        codes = [process.wait(END_S) for process in commands]
    finally:
        for process in commands:
            with ExitStack() as stack:
                stack.callback(process.wait)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    seconds = seconds_until_ranks_ended(folder, ranks)
    assert 0 not in codes, outputs(folder)
    print(f"all ended {seconds:.1f} s after the death of a rank")
    return seconds


def seconds_until_ranks_ended(folder, ranks):
    """From the time in the file `died`."""
    died = float((folder / "died").read_text())
    pids = [int((folder / f"pid_{rank}").read_text()) for rank in range(ranks)]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.time() < died + END_S, f"ranks are left: {outputs(folder)}"
        time.sleep(0.05)
    return time.time() - died


def needs(program, package):
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"no {program}: apt-get install {package}"
    )
