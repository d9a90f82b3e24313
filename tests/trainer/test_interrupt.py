"""Ctrl-C in a run of several processes ends them all, and the run goes on from its last file."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_modules import SimpleCNNModule
from lightning_shard.cli.main import main
from tests.checkpoint.tiny import leave_group
from tests.trainer.test_bad_input import CONFIG

RUN = (
    CONFIG.replace("max_epochs: 1", "max_epochs: 500")
    .replace("    - class_path: tests.trainer.test_bad_input.FailOnSecondRank\n", "")
    .replace("save_on_exception: true", "save_last: true\n        every_n_epochs: 5")
)
START_S, END_S = 240, 90


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_interrupt_and_resume(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(RUN)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        # below the ports that the system hands out, of which one may be taken before it is used
        "MASTER_PORT": str(20000 + os.getpid() % 10000),
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "lightning_shard", "fit", "--config", "config.yaml"],
        cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    last = tmp_path / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + START_S
    while not last.exists() and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.2)
    deadline = time.monotonic() + END_S
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to every process
    output, _ = started.communicate(timeout=END_S)
    assert last.exists(), output
    assert "KeyboardInterrupt" in output
    (after,) = re.findall(r"Interrupted after step (\d+)", output)
    assert torch.load(last, weights_only=True)["global_step"] == int(after), output
    assert "The last checkpoint is of step" not in output
    folder = tmp_path / "checkpoints"
    go_on = f"fit --config {folder / 'config.yaml'} --ckpt_path {folder / 'last.ckpt'}"
    assert go_on in output, output
    assert "failed first" not in output, output
    while (left := _alive(started.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "processes of the run are left"
    names = {p.name for p in last.parent.iterdir() if p.suffix != ".ckpt"}
    assert names == {"config.yaml"}, "nothing half-written is left"
    monkeypatch.chdir(tmp_path)
    words = ["--ckpt_path", "checkpoints/last.ckpt", "--trainer.max_steps", "1"]
    alone = ["--trainer.devices", "1", "--trainer.strategy.domain_parallel_size", "1"]
    with mock.patch.object(SimpleCNNModule, "on_load_checkpoint", autospec=True) as loads:
        try:
            main(["fit", "--config", "config.yaml", *words, *alone])
        finally:
            leave_group()
    (_, restored), _ = loads.call_args
    assert restored["global_step"] > 0


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
