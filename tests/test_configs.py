"""Every file in configs/ is understood by the command line; the short ones run."""

from pathlib import Path

import pytest
import yaml

from lightning_shard.cli import main as cli
from lightning_shard.cli import report
from tests.tiny import leave_group

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def one_process_in_its_own_folder(monkeypatch, tmp_path):
    for name in (*report.RANKS, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_parses(capsys, path):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", "--config", str(path), "--print_config"])
    assert exit_info.value.code == 0
    found, wanted = yaml.safe_load(capsys.readouterr().out), yaml.safe_load(path.read_text())
    assert found["trainer"]["accelerator"] == wanted["trainer"]["accelerator"]
    assert found["model"]["class_path"].endswith(wanted["model"]["class_path"].split(".")[-1])


# one process and a few batches: neither workers nor Lightning's logging interval are needed
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed:UserWarning")
def test_mnist_on_another_device_than_an_intel_gpu(capsys):
    (path,) = (path for path in CONFIGS if path.stem == "mnist_xpu")
    trainer = {
        "accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1,
        "limit_test_batches": 1,
    }  # fmt: skip
    sizes = ("--data.init_args.batch_size=4", "--data.init_args.eval_batch_size=4")
    options = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    try:
        cli.main(["fit", "--config", str(path), *options, *sizes])
    finally:
        leave_group()
    assert "Elapsed device time of training (cpu): " in capsys.readouterr().out


def test_mnist_without_an_intel_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.xpu.is_available", lambda: False)
    (path,) = (path for path in CONFIGS if path.stem == "mnist_xpu")
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", "--config", str(path)])
    assert exit_info.value.code == 2
    assert "but this machine has no xpu device; use cpu or auto" in capsys.readouterr().err
