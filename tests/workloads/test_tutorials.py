"""Each tutorial's config has the numbers of its document, and runs offline by its name alone."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from lightning_modules import MNISTNet, SummarizationDataModule
from lightning_modules.t5 import docstrings
from lightning_shard.cli import main as cli
from tests import training
from tests.checkpoint.tiny import leave_group
from tests.workloads.t5.texts import write_articles

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "tutorials.md").read_text()
CONFIGS = sorted((ROOT / "configs" / "tutorials").glob("*.yaml"))

# what the documents say, by the keys of our configs
NUMBERS = {
    "tfno_darcy": {
        "trainer.max_epochs": 20,
        "model.n_modes": [64, 64],
        "model.hidden_channels": 256,
        "model.projection_channel_ratio": 512 / 256,
        "model.factorization": "tucker",
        "model.rank": 0.42,
        "model.positional_embedding": "grid",
        "model.loss": "h1",
        "model.optimizer": ("torch.optim.Adam", {"lr": 8e-3, "weight_decay": 1e-4 / 10}),
        "model.lr_scheduler": ("torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max": 30}),
        "data.num_train": 10,
        "data.batch_size": 32,
        "data.test_resolutions": [16, 32],
        "data.num_test": [100, 50],
        "data.eval_batch_size": [32, 32],
        "data.num_val": 0,
    },
    "shardtensor_cnn": {
        "trainer.max_epochs": 5,
        "trainer.limit_train_batches": 10,
        "trainer.devices": 4,
        "trainer.strategy.domain_parallel_size": 2,
        "trainer.strategy.shard_dims": 2,
        "trainer.log_every_n_steps": 2,
        "model.in_channels": 3,
        "model.hidden_channels": 16,
        "model.num_classes": 10,
        "model.optimizer": ("torch.optim.Adam", {"lr": 1e-3}),
        "data.resolution": [32, 64],
        "data.batch_size": 32,
        "data.amplitude": 0,
        "data.noise": 1.0,
    },
    "xpu_mnist": {
        "seed_everything": 1,
        "trainer.max_epochs": 10,
        "trainer.strategy.sharding.min_num_params": 100,
        "model.conv_dropout": 0.25,
        "model.linear_dropout": 0.5,
        "model.loss_reduction": "sum",
        "model.optimizer": ("torch.optim.Adadelta", {"lr": 1.0}),
        "model.lr_scheduler": ("torch.optim.lr_scheduler.StepLR", {"step_size": 1, "gamma": 0.7}),
        "data.batch_size": 64,
        "data.eval_batch_size": 1000,
        "data.num_workers": 2,
        "data.pin_memory": True,
        "data.val_fraction": 0,
    },
    "t5": {
        "seed_everything": 1,
        "trainer.max_epochs": 2,
        "trainer.strategy.sharding.wrap": ["T5Block"],
        "trainer.strategy.sharding.mp_policy": {
            "param_dtype": "bfloat16",
            "reduce_dtype": "bfloat16",
        },
        "trainer.strategy.sharding.mp_policy_where_supported": True,
        "model.optimizer": ("torch.optim.AdamW", {"lr": 2e-3}),
        "model.lr_scheduler": ("torch.optim.lr_scheduler.StepLR", {"step_size": 1, "gamma": 0.7}),
        "data.num_train": 1500,
        "data.num_val": 300,
        "data.max_source_tokens": 512,
        "data.max_summary_tokens": 150,
        "data.batch_size": 4,
        "data.eval_batch_size": 4,
        "data.num_workers": 2,
        "data.pin_memory": True,
    },
}
QUICK = [
    "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1",
]  # fmt: skip
# of the data and the networks, where a step of the config's own would take long
SMALLER = {
    "tfno_darcy": [
        "--model.init_args.hidden_channels=4", "--model.init_args.n_modes=[4,4]",
        "--data.init_args.num_train=2", "--data.init_args.num_test=[3,2]",
        "--data.init_args.num_workers=0",
    ],
    "shardtensor_cnn": ["--data.init_args.num_train=128", "--trainer.limit_val_batches=0"],
    "xpu_mnist": ["--data.init_args.num_workers=0", "--data.init_args.eval_batch_size=8"],
    "t5": [
        "--data.init_args.corpus.init_args.packages=[]", "--data.init_args.num_workers=0",
        "--data.init_args.num_train=4", "--data.init_args.num_val=4", "--data.init_args.num_test=4",
    ],
}  # fmt: skip

pytestmark = [
    # one process and a few batches: neither workers nor Lightning's logging interval are needed
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed:UserWarning"),
]


@pytest.fixture
def in_a_new_folder(monkeypatch, tmp_path):
    """Where a user begins: nothing is there, and the configs are not beside it."""
    monkeypatch.chdir(tmp_path)


def value_at(config: dict, key: str) -> object:
    """What stands at a key; `init_args` in between are understood."""
    for name in key.split("."):
        config = config[name] if name in config else config["init_args"][name]
    if isinstance(config, dict) and "class_path" in config:
        return config["class_path"], config["init_args"]
    return config


def run(name: str, *words: str) -> None:
    try:
        cli.main(["fit", "--config", f"tutorials/{name}", *QUICK, *SMALLER[name], *words])
    finally:
        leave_group()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_has_the_numbers_of_its_document(path):
    config = yaml.safe_load(path.read_text())
    found = {key: value_at(config, key) for key in NUMBERS[path.stem]}
    assert found == NUMBERS[path.stem]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_command_and_the_line_of_the_real_data_are_documented(path):
    text, name = path.read_text(), f"tutorials/{path.stem}"
    assert f"python -m lightning_shard fit --config {name}\n" in text
    assert f"python -m lightning_shard fit --config {name}\n" in DOCUMENT
    if path.stem != "shardtensor_cnn":  # whose data are random in its document, too
        (line,) = re.findall(r"^#   (--data\S+ .*)", text, re.MULTILINE)
        assert f"python -m lightning_shard fit --config {name} {line}" in DOCUMENT


def test_what_differs_has_a_reason():
    """A row says what is here; a difference or a thing not run is followed by words."""
    rows = re.findall(r"^\| .+ \|$", DOCUMENT, re.MULTILINE)
    assert len(rows) > 80
    assert [row for row in rows if row.count(" | ") not in (1, 2)] == []
    for mark in ("**differs**", "**not run here**"):
        after = [row.split(mark, 1)[1].split() for row in rows if mark in row]
        assert len(after) >= 3
        assert min(map(len, after)) >= 5, mark


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_new_folder")
def test_tfno(capsys):
    run("tfno_darcy")
    out = capsys.readouterr().out
    assert "new best val/loss" in out
    logged = next(Path("outputs").rglob("metrics.csv")).read_text()
    assert all(f"val/{norm}_{n}" in logged for norm in ("h1", "l2") for n in (16, 32))
    pictures = {path.name for path in Path("outputs").rglob("*.png")}
    assert {"test_16.png", "test_32.png"} <= pictures


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_new_folder")
def test_mnist(capsys):
    run("xpu_mnist")
    out = capsys.readouterr().out
    assert "Elapsed device time of training (cpu): " in out
    assert re.search(r"Epoch 0: .*val/loss [\d.]+, val/accuracy [\d.]+, train/loss", out)
    (path,) = Path("outputs").rglob("mnist_cnn.pt")
    MNISTNet().load_state_dict(torch.load(path, weights_only=True))


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_new_folder")
@pytest.mark.parametrize("corpus", ["docstrings", "wikihow"])
def test_t5(capsys, monkeypatch, corpus):
    whole = docstrings.installed  # of the standard library read a part: 5 s
    monkeypatch.setattr(docstrings, "installed", lambda names: list(map(part_of, whole(names))))
    real: list[str] = []
    if corpus == "wikihow":
        write_articles(Path("data"), 400)  # where the document puts the file
        real = ["--data.init_args.corpus=WikiHow", "--data.init_args.vocab_size=64"]
    run("t5", *real)
    out = capsys.readouterr().out
    assert "new best val/loss" in out
    kept = [path.name for path in Path("outputs").rglob("T5-model-*.ckpt")]
    assert len(kept) == 1
    assert re.fullmatch(r"T5-model-\d{4}(-\d\d){5}-0-\d+\.\d{4}\.ckpt", kept[0])


def part_of(package: docstrings.Package) -> docstrings.Package:
    return package._replace(files=lambda: package.files()[:40])


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_cnn_on_two_by_two_ranks():
    with contextlib.chdir(training.shared_path(".")):
        cli.main(
            ["fit", "--config", "tutorials/shardtensor_cnn", *QUICK, *SMALLER["shardtensor_cnn"]]
        )
        dist.barrier()
        assert list(Path("outputs").rglob("metrics.csv"))


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_new_folder")
def test_the_packages_of_t5_have_as_many_pairs():
    """Shortened as above the config would not notice."""
    config = yaml.safe_load((ROOT / "configs" / "tutorials" / "t5.yaml").read_text())
    options = dict(config["data"]["init_args"])
    corpus = docstrings.Docstrings(**options.pop("corpus")["init_args"])
    data = SummarizationDataModule(corpus, **options)
    assert {split: len(pairs) for split, pairs in data._read().items()} == {
        "train": 1500, "val": 300, "test": 300,
    }  # fmt: skip


@pytest.mark.usefixtures("in_a_new_folder")
def test_cnn_on_one_rank():
    alone = ["--trainer.devices=1", "--trainer.strategy.init_args.domain_parallel_size=1"]
    run("shardtensor_cnn", *alone)
    assert "train/loss" in next(Path("outputs").rglob("metrics.csv")).read_text()


def test_they_are_found_where_the_package_is_installed(tmp_path, monkeypatch):
    """The wheel has the configs inside lightning_modules."""
    from lightning_shard.cli import positions

    inside = tmp_path / "lightning_modules"
    inside.mkdir()
    (inside / "configs").symlink_to(ROOT / "configs")
    spec = type("Spec", (), {"submodule_search_locations": [str(inside)]})
    monkeypatch.setattr(positions.importlib.util, "find_spec", lambda _: spec)
    found = positions.find_configs(["fit", "--config", "tutorials/xpu_mnist"])
    assert found[2] == str(inside / "configs" / "tutorials" / "xpu_mnist.yaml")
    with pytest.raises(positions.UsageError, match="did you mean 'tutorials/xpu_mnist'"):
        positions.find_configs(["fit", "--config=tutorials/xpu_mnits"])
