from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_shard.cli.main import main
from lightning_shard.lab.clusters import read_cluster
from tests.cli.test_configs import DARCY, NETWORK, files
from tests.lab.test_best import Machine

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


@pytest.mark.slow
def test_plan_goes_by_the_options_of_sharding(capfd):
    """Only shards are gathered."""
    own = ["--trainer.strategy.sharding.mode", "full"]
    for options, words in (([], "gradients "), (own, "gathered ")):
        main(["plan", *files("tfno_darcy domain_2"), *SMALL, *SMALL_NETWORK, *options])
        assert words in capfd.readouterr().out


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
    model = "--model=tests.cli.test_lab_commands.Unsupported"
    data = ["--data=lightning_modules.DarcyDataModule", *SMALL]
    with pytest.raises(SystemExit) as stop:
        main(["check", model, *data])
    assert stop.value.code == 1
    out = capfd.readouterr().out
    assert "Without a rule for split tensors, computed on gathered ones in training_step" in out
    assert "svdvals" in out


@pytest.mark.parametrize("command", ["check", "certify"])
def test_ranks_hold_what_the_mode_of_the_strategy_says(command):
    """What its other options do to the numbers is rounding."""
    own = ["--trainer.strategy.sharding.mode=full", "--trainer.strategy.sharding.cpu_offload=true"]
    with (
        mock.patch(f"lightning_shard.cli.lab_commands.{command}") as tried,
        mock.patch("builtins.print"),
    ):
        tried.return_value.save.return_value = "page"
        main([command, *files("tfno_darcy domain_2"), *SMALL, *SMALL_NETWORK, *own])
    assert tried.call_args.kwargs["sharding"] == "full"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.num_nodes=x"], "trainer.num_nodes must be an integer; got 'x'"),
        (["--config", "none.yaml"], "config file 'none.yaml' does not exist"),
        (["--trainer.max_epoch=2"], "did you mean 'max_epochs'"),
    ],
)
def test_mistakes(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *files("tfno_darcy"), *SMALL, *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_plan_of_the_best_mesh(capfd, tmp_path):
    words = ["--best", "--cluster=2x2xH100", "--price=2", "--output=kept"]
    with mock.patch("lightning_shard.lab.search.predict", Machine(10**9)):
        main(["plan", *files("tfno_darcy domain_2"), *SMALL, *SMALL_NETWORK, *words])
    out, err = capfd.readouterr()
    assert "4 devices: 2x2xH100 (measured on one card" in out
    assert "4x1   gradients  kept" in out
    assert "written to kept/plan.yaml" in err
    fit = ["fit", *files("tfno_darcy"), *SMALL, *SMALL_NETWORK, "--config=kept/plan.yaml"]
    with pytest.raises(SystemExit) as stop:
        main([*fit, "--print_config"])
    assert stop.value.code == 0, capfd.readouterr().err


@pytest.mark.slow
def test_plan_of_sizes_of_offload(capfd):
    main(["plan", *files("tfno_darcy"), *SMALL, *SMALL_NETWORK, "--offload", "--cluster=1xH100"])
    rows = capfd.readouterr().out.splitlines()
    assert rows[0] == read_cluster("1xH100").origin
    assert rows[2].split("  ")[0] == "size"
    assert len(rows) == 3 + 7 + 1


@pytest.mark.slow
def test_plan_of_a_mesh_on_a_cluster(capfd):
    command = ["plan", *files("tfno_darcy domain_2"), *SMALL, *SMALL_NETWORK]
    main([*command, "--cluster=4xA100"])
    first, _, title, step, *_ = capfd.readouterr().out.splitlines()
    assert first == read_cluster("4xA100").origin
    assert title.startswith(
        "One of 4 ranks (2 data replicas x 2 domain ranks) of 1x4xA100-80 (from"
    )
    assert step.startswith("  step ")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--cluster=3xA100"])
    assert stop.value.code == 2
    assert "the 3 devices must be a multiple of the 2 ranks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--best"], "--best needs --cluster, such as --cluster 8x8xH100"),
        (["--price=2"], "--price needs --cluster"),
        (["--offload"], "--offload needs --cluster, such as --cluster 8x8xH100"),
        (["--offload", "--best", "--cluster=1xH100"], "leave out --best and --measure"),
        (["--offload", "--tiles=4", "--cluster=1xH100"], "leave out --tiles or --offload"),
        (["--cluster=8x8xH10O"], "'H10O' is no known device; did you mean 'H100'?"),
        (["--cluster=8xH100", "--price=cheap"], "--price: invalid float value: 'cheap'"),
        (["--best", "--cluster=8xH100", f"--output={__file__}"], "is a file; give a folder"),
        (["--best", "--cluster=8xH100", f"--output={__file__}/a"], "Not a directory; give another"),
        (["--cluster=8xH100", "--price=-1"], "the price of a device and hour must be larger"),
    ],
)
def test_mistakes_of_plan(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *files("tfno_darcy"), *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_certify(capfd, tmp_path):
    words = ["--meshes=1x2,2x1x2", "--steps=2", "--simulated", "--trainer.default_root_dir=run"]
    main(["certify", *files("tfno_darcy domain_2x2"), *SMALL, *SMALL_NETWORK, *words])
    out, err = capfd.readouterr()
    assert "Training on the meshes 1x2, 2x1x2 equals training in one process, over 2 steps" in out
    assert "| model | TFNODarcy |" in out
    assert "| config | sha256 " in out
    assert "written to run/certificate.md" in err
    assert {p.suffix for p in (tmp_path / "run").glob("certificate.*")} == {".md", ".json"}


@pytest.mark.slow
def test_certify_ends_with_1_where_a_mesh_differs(capfd):
    words = ["--meshes=2x1", "--steps=1", "--simulated", "--output=kept"]
    model = "--model=tests.cli.test_lab_commands.Normalized"
    with pytest.raises(SystemExit) as stop:
        main(["certify", model, "--data=lightning_modules.DarcyDataModule", *SMALL, *words])
    assert stop.value.code == 1
    out = capfd.readouterr().out
    assert "in module norm (BatchNorm2d) is the first whose output differs" in out
    assert "Each data replica has statistics of its own samples, as in DDP." in out


class Normalized(LightningModule):
    """To which a share of a batch is not alike."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(1)

    def training_step(self, batch, batch_idx):
        return self.norm(batch["x"]).exp().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow_rows("words4-replicas of the mesh 3x1 cannot share a batch of 2")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--meshes=1x2,4"], "'4' is no mesh: data replicas x ranks of a domain, such as 2x2"),
        (["--meshes=0x2"], "'0x2' is no mesh"),
        (["--steps=many"], "'many' is no whole number from 1 on"),
        (["--mesh=1x2"], "'mesh'"),
        (["--meshes=3x1", "--simulated"], "replicas of the mesh 3x1 cannot share a batch of 2"),
        ([f"--output={__file__}/a"], "Not a directory; give another folder"),
    ],
)
def test_mistakes_of_certify(capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["certify", *files("tfno_darcy"), *SMALL, *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_sizes_that_do_not_fit(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *files("tfno_darcy domain_2"), *SMALL, "--trainer.devices=3"])
    assert stop.value.code == 1
    assert "the 3 processes must be a multiple of the 2 ranks" in capsys.readouterr().err
