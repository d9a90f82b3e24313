import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_shard.cli.main import main
from tests.cli.test_configs import DARCY, NETWORK, files

SMALL = [
    *(f"--data.init_args.{name}={value}" for name, value in DARCY.items()),
    "--data.init_args.train_resolution=16",
    "--data.init_args.test_resolutions=[16]",
]
SMALL_NETWORK = [f"--model.init_args.{name}={value}" for name, value in NETWORK.items()]


@pytest.fixture(autouse=True)
def in_its_own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_check(capfd):
    main(["check", *files("tfno_darcy domain_2"), *SMALL, *SMALL_NETWORK])
    out = capfd.readouterr().out
    assert "One training step on 2 ranks equals that of one process" in out
    assert "loss " in out


def test_plan(capfd):
    """Of a machine that is not this one."""
    main(["plan", *files("tfno_darcy node_of_8 domain_2 bf16"), *SMALL, *SMALL_NETWORK])
    out = capfd.readouterr().out
    assert "One of 8 ranks (4 data replicas x 2 domain ranks), in one training step" in out
    for name in ("parameters", "optimizer", "activations", "sent: fields"):
        assert f"  {name} " in out


class Unsupported(LightningModule):
    """Sorts by a function that no rank can compute alone."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return self.scale * torch.linalg.svdvals(batch["x"]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def test_check_of_a_module_that_does_not_run(capfd):
    model = "--model=tests.cli.test_rehearsal_commands.Unsupported"
    data = ["--data=lightning_modules.DarcyDataModule", *SMALL]
    with pytest.raises(SystemExit) as stop:
        main(["check", model, *data])
    assert stop.value.code == 1
    out = capfd.readouterr().out
    assert "Without a rule for split tensors, computed on gathered ones in training_step" in out
    assert "svdvals" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.num_nodes=x"], "num_nodes must be a whole number from 1 on; got 'x'"),
        (["--config", "none.yaml"], "config file 'none.yaml' does not exist"),
        (["--trainer.max_epoch=2"], "did you mean 'max_epochs'"),
    ],
)
def test_mistakes(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *files("tfno_darcy"), *SMALL, *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_sizes_that_do_not_fit(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *files("tfno_darcy domain_2"), *SMALL, "--trainer.devices=3"])
    assert stop.value.code == 1
    assert "the 3 processes must be a multiple of the 2 ranks" in capsys.readouterr().err
