"""A signal stops each config that trains offline, and the line that it prints goes on there."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shard.cli import main as cli
from lightning_shard.cli.run_state import words_of_a_failure, words_of_an_interrupt
from tests.checkpoint.tiny import leave_group
from tests.cli.stopped import AT_STEP
from tests.cli.test_configs import FOLDER, NETWORK, SMALLER

RUN_S = 300
TRAINER = {
    "accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1,
    "limit_test_batches": 1,
}  # fmt: skip
BATCHES = {"batch_size": 2, "num_train": 16}
# beside test_configs.SMALLER: data of more than one batch, and networks of the tutorials
MORE = {
    "aurora": {"data": BATCHES},
    "segmentation": {"data": BATCHES},
    "simple_cnn": {"data": {"resolution": [8, 16], **BATCHES}},
    "t5_docstrings": {"data": BATCHES},
    "tfno_darcy": {"data": BATCHES},
    "tfno_darcy_large": {"data": BATCHES},
    "tutorials/shardtensor_cnn": {"data": {"resolution": [8, 16], **BATCHES}},
    "tutorials/t5": {"data": {"num_train": 16, "num_val": 4, "num_test": 4}},
    "tutorials/tfno_darcy": {"data": {"batch_size": 2, "num_test": [2, 2]}, "model": NETWORK},
    "tutorials/xpu_mnist": {"data": {"batch_size": 4}},
    "whole_ct": {"data": BATCHES | {"batch_size": 1}},
}
NEEDS_FILES = {"t5_wikihow"}
IN_NEW_PROCESSES = {  # as a user starts them; of each kind one
    "mnist_cnn",  # one process
    "tutorials/t5",  # with FSDP2, and workers that read data
    "tutorials/shardtensor_cnn",  # four ranks, three of which the first one starts
}
NAMES = [
    str(path.relative_to(FOLDER).with_suffix(""))
    for path in sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("tutorials/*.yaml")])
    if path.stem not in NEEDS_FILES
]
PAIR = ["--trainer.devices=2", "--trainer.strategy.domain_parallel_size=2"]


def start(command, folder):
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def command_line(name, callback):
    """The words of a short run of a config, with a callback of stopped.py."""
    chosen = [("trainer", TRAINER | {"callbacks+": f"tests.cli.stopped.{callback}"})]
    for table in (SMALLER, MORE):
        chosen += [(f"{part}.init_args", v) for part, v in table.get(name, {}).items()]
    options = [f"--{part}.{key}={v}" for part, values in chosen for key, v in values.items()]
    return ["fit", "--config", str(FOLDER / f"{name}.yaml"), *options]


def finish(process):
    try:
        output, _ = process.communicate(timeout=RUN_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return output


def stop_and_go_on(name, folder, number, *more, ranks=1, send=os.killpg, by=()):
    """Stop a run, and run the line that it prints.

    Args:
        name: The config.
        folder: The working folder of both runs.
        number: The signal.
        more: Words of the command line.
        ranks: Number of processes.
        send: Sends the signal, given the number of the first process.
        by: The words that start a launcher.
    """
    words = [*by, "-m", "lightning_shard", *command_line(name, "WaitForSignal"), *more]
    run, deadline = start(words, folder), time.monotonic() + RUN_S
    while len([*folder.glob("waits_*")]) < ranks and run.poll() is None:
        if time.monotonic() > deadline:
            os.killpg(run.pid, signal.SIGKILL)
        time.sleep(0.05)
    if run.poll() is None:
        send(run.pid, number)
        time.sleep(0.1)  # until handlers have run
        (folder / "sent").touch()
    output = finish(run)
    assert run.returncode == (1 if by or number == signal.SIGINT else 143), output
    step, line = what_it_says(output, folder)
    again = start([*by, *line], folder)
    output = finish(again)
    assert again.returncode == 0, output
    assert steps_at_which_runs_began(folder) == [0, step]
    return output


def what_it_says(output, folder):
    """The step at which a run was interrupted, and the words after `python` of its line."""
    (step,) = map(int, re.findall(r"^Interrupted after step (\d+)\.$", output, re.MULTILINE))
    assert step >= AT_STEP
    (line,) = re.findall(r"^Resume: python (.*)$", output, re.MULTILINE)
    words = shlex.split(line)
    last = Path(words[-1])
    assert last.name == "last.ckpt"
    assert torch.load(folder / last, weights_only=False)["global_step"] == step
    return step, words


def steps_at_which_runs_began(folder):
    return [int(line) for line in (folder / "begun").read_text().split()]


@pytest.mark.slow  # each command line imports all, twice
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", sorted(IN_NEW_PROCESSES))
def test_the_line_goes_on_after_ctrl_c(name, tmp_path):
    ranks = 4 if name == "tutorials/shardtensor_cnn" else 1
    stop_and_go_on(name, tmp_path, signal.SIGINT, ranks=ranks)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("default")  # as in a new process: so short runs cause some
@pytest.mark.parametrize("name", [name for name in NAMES if name not in IN_NEW_PROCESSES])
def test_the_line_goes_on_in_this_process(name, tmp_path, monkeypatch, capsys):
    if name == "aurora":
        pytest.importorskip("aurora", reason="microsoft-aurora is not installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        run(command_line(name, "InterruptsItself"))
    assert exit_info.value.code == 1
    step, line = what_it_says(capsys.readouterr().err, tmp_path)
    assert line[:2] == ["-m", "lightning_shard"]
    run(line[2:])
    assert steps_at_which_runs_began(tmp_path) == [0, step]


def run(words):
    try:
        cli.main(words)
    finally:
        leave_group()


WAYS = {  # of SIGTERM: the words of the command line, the number of ranks, who gets it
    "one process": ("mnist_cnn", [], 1, os.kill),
    "rank 0, which has started the other": ("mnist_cnn", PAIR, 2, os.kill),
    "all, and their data workers": ("tutorials/t5", [*PAIR, "--data.num_workers=1"], 2, os.killpg),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_line_goes_on_after_sigterm(way, tmp_path):
    name, words, ranks, send = WAYS[way]
    output = stop_and_go_on(name, tmp_path, signal.SIGTERM, *words, ranks=ranks, send=send)
    assert "Traceback" not in output


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
def test_torchrun_tells_its_ranks_of_sigterm(tmp_path):
    """It tells the data workers of each rank, too, and has an exit status of its own."""
    words = [*PAIR, "--data.num_workers=1"]
    stop_and_go_on(
        "mnist_cnn", tmp_path, signal.SIGTERM, *words, ranks=2, send=os.kill, by=TORCHRUN
    )


class Network(LightningModule):
    def test_step(self, batch, batch_idx):
        pass


def test_only_a_training_names_its_step():
    """A prediction that was ended said "Interrupted after step 0", as if it were a training."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.PREDICTING
    assert words_of_an_interrupt(trainer, False) == ["Interrupted in predict."]
    assert words_of_a_failure(trainer, False) == ["The run ended in predict."]
    trainer.state.fn = TrainerFn.FITTING
    assert words_of_an_interrupt(trainer, False)[0] == "Interrupted after step 0."
    assert words_of_a_failure(trainer, False)[0] == "The run ended after step 0."


def test_the_line_can_be_pasted_where_a_folder_has_spaces(tmp_path):
    folder = tmp_path / "my runs [1]" / "it's=ü"
    folder.mkdir(parents=True)
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(Network())
    for file in (best := folder / "best.ckpt", config := folder / "config.yaml"):
        file.touch()
    trainer.checkpoint_callback.best_model_path = str(best)
    trainer.state.fn = TrainerFn.FITTING
    _, found, _, line = words_of_an_interrupt(trainer, True)
    assert found == f"Best checkpoint: {best}"
    command = ["python", "-m", "lightning_shard", "fit", "--config", str(config)]
    assert shlex.split(line) == ["Resume:", *command, "--ckpt_path", str(best)]
    best.unlink()
    assert words_of_an_interrupt(trainer, True) == ["Interrupted after step 0."]


def test_a_stopped_test_after_a_training_names_its_checkpoint(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.strategy.connect(Network())
    (best := tmp_path / "best.ckpt").touch()
    trainer.checkpoint_callback.best_model_path = str(best)
    trainer.state.fn = TrainerFn.TESTING
    command = f"python -m lightning_shard test --config ... --ckpt_path {best}"
    ways = [f"Best checkpoint: {best}", f"Test: {command}"]
    assert words_of_an_interrupt(trainer, True) == ["Interrupted in test.", *ways]
    assert words_of_a_failure(trainer, True) == ["The run ended in test.", *ways]
    assert words_of_an_interrupt(trainer, False) == ["Interrupted in test."]
