"""Every file in configs/ is understood by the command line, overlays too; all run a step."""

import contextlib
import csv
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from lightning_modules import SummarizationDataModule
from lightning_modules.t5 import docstrings
from lightning_shard import HybridShardStrategy
from lightning_shard.cli import main as cli
from lightning_shard.cli import usage as report
from tests import training
from tests.checkpoint.tiny import leave_group
from tests.workloads.t5.texts import write_articles

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
OVERLAYS = sorted((FOLDER / "overlays").glob("*.yaml"))
COMBINATIONS = [  # later files win, mappings are merged
    "tfno_darcy node_of_8 domain_2x2 bf16",
    "tfno_darcy_large nodes domain_2 zarr bf16",
    "tfno_darcy_large node_of_8 hybrid_2x2 offline",
    "mnist_cnn nodes xpu quick",
    "simple_cnn one_gpu bf16 offline",
]
DARCY = {"num_train": 2, "num_val": 2, "num_test": 2, "batch_size": 2}
NETWORK = {"hidden_channels": 2, "n_layers": 1}
PAIRS = {"num_train": 4, "num_val": 2, "num_test": 2, "batch_size": 2, "eval_batch_size": 2}
T5 = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
# of the data and the network, where a step of the config's own would take long
SMALLER = {
    "aurora": {
        "data": {"num_train": 2, "num_val": 2, "num_test": 2},
        "model": {"options": {"embed_dim": 16, "num_heads": 4}},
    },
    "mnist_cnn": {"data": {"batch_size": 4, "eval_batch_size": 8}},
    "segmentation": {
        "data": {"extents": [8, 8, 8], "num_train": 2, "num_val": 1, "num_test": 1},
        "model": {"filters": [2, 2, 2], "strides": [1, 2, 2]},
    },
    "whole_ct": {
        "data": {"extents": [8, 8, 8], "num_train": 2, "num_val": 1, "num_test": 1},
        "model": {"filters": [2, 2, 2], "strides": [1, 2, 2], "deep_supervision": 1},
    },
    "t5_docstrings": {"data": PAIRS | {"corpus.init_args.packages": []}},
    "t5_wikihow": {
        "data": PAIRS | {"tokenizer": "null", "vocab_size": 64},
        "model": {"model_name_or_path": T5, "generation": {"max_new_tokens": 4}},
    },
    "tfno_darcy": {"data": DARCY | {"test_resolutions": [64, 32]}, "model": NETWORK},
    "tfno_darcy_large": {
        "data": DARCY | {"train_resolution": 64, "test_resolutions": [64, 32]},
        "model": NETWORK,
    },
}


def files(names: str) -> list[str]:
    """The words of the command line that name a config and its overlays."""
    first, *overlays = names.split()
    paths = [FOLDER / f"{first}.yaml", *(FOLDER / "overlays" / f"{n}.yaml" for n in overlays)]
    return [word for path in paths for word in ("--config", str(path))]


def parsed(capsys, names: str) -> dict:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", *files(names), "--print_config"])
    assert exit_info.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def contains(found: object, wanted: object) -> bool:
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(
            name in found and (name == "class_path" or contains(found[name], value))
            for name, value in wanted.items()
        )
    return found == wanted


@pytest.fixture(autouse=True)
def one_process_in_its_own_folder(monkeypatch, tmp_path):
    for name in (*report.rank_variables(), "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow_rows("tfno_darcy", "tfno_darcy_large")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_parses(capsys, path):
    found, wanted = parsed(capsys, path.stem), yaml.safe_load(path.read_text())
    assert found["trainer"]["accelerator"] == wanted["trainer"]["accelerator"]
    assert found["model"]["class_path"].endswith(wanted["model"]["class_path"].split(".")[-1])


@pytest.mark.slow_rows("domain_2", "hybrid_2x2", "quick")
@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_is_laid_over_a_config(capsys, path):
    found, overlay = parsed(capsys, f"tfno_darcy {path.stem}"), yaml.safe_load(path.read_text())
    plain = yaml.safe_load((FOLDER / "tfno_darcy.yaml").read_text())
    assert contains(found, overlay)
    assert not contains(plain, overlay), "it changes nothing"
    for section in {"model", "data"} - set(overlay):
        assert contains(found[section], plain[section])


@pytest.mark.quick_rows(
    "tfno_darcy_large node_of_8 hybrid_2x2 offline", "mnist_cnn nodes xpu quick"
)
@pytest.mark.parametrize("names", COMBINATIONS)
def test_overlays_combine(capsys, names):
    found = parsed(capsys, names)
    assert contains(found, yaml.safe_load(Path(files(names)[-1]).read_text()))
    first = yaml.safe_load(Path(files(names)[1]).read_text())
    assert contains(found["model"], first["model"])
    assert ("nodes" in names) == (found["trainer"]["num_nodes"] == 2)
    whole = found["trainer"]["strategy"]["init_args"]["domain_parallel_size"] == 1
    assert whole == ("domain" not in names and "hybrid" not in names)


def test_every_file_is_in_the_docs():
    text = (FOLDER.parent / "docs" / "configs.md").read_text()
    named = set(re.findall(r"`(\w+)\.yaml`", text))
    assert named == {path.stem for path in CONFIGS + OVERLAYS}


SLOW = ("segmentation", "t5_wikihow", "tfno_darcy_large", "whole_ct")


# one process and a few batches: neither workers nor Lightning's logging interval are needed
@pytest.mark.quick_rows("aurora")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed:UserWarning")
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
@pytest.mark.parametrize(
    "name",
    [
        # MONAI takes several seconds to import; the tutorial's network is that of tfno_darcy, and
        # that of WikiHow the docstrings'
        pytest.param(path.stem, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in CONFIGS
        if path.stem != "mnist_xpu"
    ],
)
def test_one_step_runs(name, monkeypatch):
    if name == "aurora":
        pytest.importorskip("aurora", reason="microsoft-aurora is not installed")
    whole = docstrings.installed  # of the standard library read a part: 5 s
    monkeypatch.setattr(docstrings, "installed", lambda names: list(map(part_of, whole(names))))
    if name == "t5_wikihow":
        write_articles(Path("data/wikihow"), 100)
    run_quickly(name, "cpu")
    pictures = {"mnist_cnn": {"confusion.png", "mistakes.png"}, "aurora": {"forecast.png"}}
    pictures["segmentation"] = {"segmentation.png"}
    if name.startswith("tfno"):
        pictures[name] = {"error_spectrum.png", "error_by_resolution.png"}
        pictures[name] |= {"test_64.png", "test_32.png"}
    found = {path.name for path in Path("outputs").glob("**/gallery/*.png")}
    assert pictures.get(name, set()) <= found
    assert list(Path("outputs").glob("**/checkpoints/last.ckpt"))
    if name.startswith("t5"):
        assert list(Path("outputs").glob("**/checkpoints/epoch=00-val_loss=*.ckpt"))
        tables = {path.name for path in Path("outputs").glob("**/summaries/*.csv")}
        assert tables == {"epoch_0000.csv", "test.csv"}


def part_of(package: docstrings.Package) -> docstrings.Package:
    return package._replace(files=lambda: package.files()[:20])


def run_quickly(name: str, *overlays: str) -> None:
    words = files(f"{name} quick {' '.join(overlays)}")
    for section, values in SMALLER.get(name, {}).items():
        words += [f"--{section}.init_args.{key}={value}" for key, value in values.items()]
    try:
        cli.main(["fit", *words])
    finally:
        leave_group()


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ["mnist_cnn", "segmentation", "t5_docstrings", "tfno_darcy"])
def test_one_step_runs_on_two_by_two_ranks(name):
    setup = mock.patch.object(
        HybridShardStrategy, "setup", autospec=True, side_effect=HybridShardStrategy.setup
    )
    with contextlib.chdir(training.shared_path(".")), setup as called:
        run_quickly(name, "cpu", "hybrid_2x2", "offline")
    assert called.call_args.args[0].device_mesh.shape == (2, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed:UserWarning")
def test_digits_are_learnt():
    """97 % offline; it takes less than two minutes on two cores."""
    try:
        cli.main(["fit", *files("mnist_cnn cpu")])
    finally:
        leave_group()
    (path,) = Path("outputs").glob("**/metrics.csv")
    with path.open() as file:
        tested = [row["test/accuracy"] for row in csv.DictReader(file) if row["test/accuracy"]]
    assert float(tested[-1]) >= 0.97


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tensorboardX. has been removed:UserWarning")
def test_docstrings_teach_more_than_how_often_tokens_occur():
    """In 250 steps; docs/t5.md has the ROUGE of the whole training, which takes minutes."""
    limits = {"max_epochs": 1, "limit_train_batches": 250}
    limits |= {f"limit_{stage}_batches": 1 for stage in ("val", "test")}
    try:
        cli.main(
            ["fit", *files("t5_docstrings cpu"), *(f"--trainer.{k}={v}" for k, v in limits.items())]
        )
    finally:
        leave_group()
    (path,) = Path("outputs").glob("**/metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    (loss,) = (float(row["val/loss"]) for row in rows if row["val/loss"])
    assert loss < loss_of_frequencies() - 0.7
    (tested,) = (row for row in rows if row["test/rougeL"])
    assert float(tested["test/rougeL_first_words"]) > 0


def loss_of_frequencies() -> float:
    """What a model would reach on the first batch that knows how often each token occurs."""
    config = yaml.safe_load((FOLDER / "t5_docstrings.yaml").read_text())
    options = config["data"]["init_args"]
    corpus = docstrings.Docstrings(**options.pop("corpus")["init_args"])
    data = SummarizationDataModule(corpus, **options)
    data.setup("fit")
    trained = torch.cat([batch["labels"].flatten() for batch in data.train_dataloader()])
    counts = torch.bincount(trained[trained >= 0], minlength=options["vocab_size"]) + 1.0
    labels = next(iter(data.val_dataloader()))["labels"]
    return -(counts / counts.sum()).log()[labels[labels >= 0]].mean().item()


# one process and a few batches: neither workers nor Lightning's logging interval are needed
@pytest.mark.slow
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
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert "XPUAccelerator` can not run on your system" in error
    assert f"trainer.accelerator is set at {path}" in error


def test_wikihow_without_its_files(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", *files("t5_wikihow cpu")])
    leave_group()
    assert exit_info.value.code == 1
    assert "WikiHow needs the file data/wikihow/wikihowAll.csv" in capsys.readouterr().err
