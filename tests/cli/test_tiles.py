"""Commands in tiles: what they leave and print is that of one process, or they refuse."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.cli import main as cli
from lightning_shard.cli.tiles import builder
from lightning_shard.lab import least_tiles
from tests.cli.test_errors import HybridShardStrategy as HybridShardStrategy
from tests.parity import assert_same

HERE = __name__
CONFIG = f"""\
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  callbacks: {{class_path: {HERE}.Keep}}
model: {HERE}.Net
data: {HERE}.Data
"""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4)).double()

    def _loss(self, batch: dict[str, Any], name: str) -> Tensor:
        loss = (self.layers(batch["field"])[:, :2] - batch["field"]).square().mean()
        self.log(name, loss)
        return loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        print("step", batch_idx, batch["name"])
        return self._loss(batch, "loss")

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._loss(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._loss(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # eps keeps gradients that are zero but for rounding from the weights
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-4)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        assert self.trainer.predicting
        return {"field": self.layers(batch["field"]).tanh(), "name": batch["name"][0]}


class Data(LightningDataModule):
    def __init__(self, rows: int = 19) -> None:
        super().__init__()
        self.rows = rows

    def predict_dataloader(self) -> DataLoader[Any]:
        numbers = torch.Generator().manual_seed(1)
        fields = [torch.randn(2, self.rows, 12, generator=numbers).double() for _ in range(2)]
        return DataLoader([{"field": x, "name": str(n)} for n, x in enumerate(fields)])

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader


class Keep(BasePredictionWriter):
    found: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__("batch")

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        assert type(prediction["field"]) is Tensor
        self.found.append(prediction)


def predicted(folder: Path, *words: str) -> list[Any]:
    path = folder / "given.yaml"
    path.write_text(CONFIG)
    Keep.found = []
    where = ["--config", str(path), "--trainer.default_root_dir", str(folder)]
    cli.main(["predict", *where, *words])
    return Keep.found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_predicts_in_tiles(tmp_path: Path) -> None:
    wanted = predicted(tmp_path, "--trainer.strategy", "auto")
    files = ["--tile_memory", str(tmp_path), "--tile_budget", "1MB"]
    for words in (["8"], ["[2,3]"], ["3", *files]):
        found = predicted(tmp_path, "--tiles", *words)
        assert [x["name"] for x in found] == ["0", "1"]
        for got, want in zip(found, wanted, strict=True):
            assert_same(got["field"], want["field"])
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml", "config.yaml"}


class Interrupt(Callback):
    """Lets Ctrl-C come after the first step."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # until the main thread has it


FIT = f"""\
trainer:
  accelerator: cpu
  enable_progress_bar: false
  log_every_n_steps: 1
  max_epochs: 1
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {{save_dir: ., name: "", version: ""}}
model: {HERE}.Net
data: {HERE}.Data
"""


def run(folder: Path, command: str, *words: str) -> None:
    """Run a command within a folder, by the config that an earlier one has left there, if any."""
    folder.mkdir(exist_ok=True)
    with chdir(folder):
        if not Path("config.yaml").exists():
            Path("config.yaml").write_text(FIT)
        cli.main([command, "--config", "config.yaml", *words])


def left_by(folder: Path) -> tuple[list[str], dict[str, Tensor], list[dict[str, str]]]:
    """Return the names of files, the weights of the last step, and the rows of the log."""
    (last,) = folder.rglob("*step=2*.ckpt")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    return names, torch.load(last, weights_only=True)["state_dict"], rows


def assert_alike(found: Path, wanted: Path) -> None:
    names, values, rows = left_by(found)
    names_, values_, rows_ = left_by(wanted)
    assert names == names_
    for name, value in values_.items():
        assert_same(values[name], value, name)
    assert len(rows) == len(rows_)
    for row, row_ in zip(rows, rows_, strict=True):
        assert row.keys() == row_.keys()
        for name in row.keys() - {"samples/s"}:
            assert float(row[name] or 0) == pytest.approx(float(row_[name] or 0), rel=1e-10)


QUIET = pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, about folders and loaders


def test_random_numbers_are_those_of_one_process_unless_somebody_says_no() -> None:
    """The parser gives each option that nobody gave its default, which is None."""
    config = {"tiles": 2, "tile_memory": None, "tile_budget": None}
    build = builder("fit", config, lambda kind, **options: kind(**options))
    for given, meant in ((None, True), (True, True), (False, False)):
        assert build(lightning_shard.HybridShardStrategy, exact_random=given).exact_random is meant


@pytest.mark.slow
@QUIET
def test_trains_in_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One log, one checkpoint and the words of one process; the saved config tests and goes on."""
    one, said = tmp_path / "one", dict[str, list[str]]()
    files = ["--tile_memory", str(tmp_path)]
    for name, words in {
        "one": [],
        "two": ["--tiles", "2x2"],
        "three": ["--tiles=3", *files, "--tile_budget", "1MB"],
    }.items():
        run(tmp_path / name, "fit", *words)
        printed = capsys.readouterr()
        said[name] = [line for line in printed.out.splitlines() if "step" in line]
        said[name] += [re.sub(r"[\d.]+ s\b", "", x) for x in printed.err.splitlines()[-6:]]
        assert said[name] == [line.replace("/one/", f"/{name}/") for line in said["one"]]
        assert_alike(tmp_path / name, one)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "three"}
    page = (tmp_path / "two" / "report.html").read_text()
    assert re.search(r"processes\D+1 \(cpu", page)
    assert re.search(r"tiles\D+2 x 2", page)
    (last,) = (tmp_path / "two").rglob("*.ckpt")
    for command in ("test", "validate"):
        for words in ([], ["--tiles", "null"]):
            run(tmp_path / "two", command, "--ckpt_path", str(last), *words)
        found = re.findall(r"│ +(?:test|val) +│ +([\d.]+)", capsys.readouterr().out)
        assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-10)


@pytest.mark.slow
@QUIET
def test_goes_on_in_tiles_or_without(tmp_path: Path) -> None:
    """The config of a run in tiles serves other meshes, too."""
    for name, words in {"one": [], "two": ["--tiles", "2"]}.items():
        run(tmp_path / name, "fit", *words)
    (last,) = (tmp_path / "two").rglob("*.ckpt")
    one = weights_after_two_epochs(tmp_path / "one")
    for words in ([], ["--tiles", "null"], ["--tiles", "2x3"]):
        found = weights_after_two_epochs(tmp_path / "two", last, *words)
        for name, value in one.items():
            assert_same(found[name], value, name)


def weights_after_two_epochs(
    folder: Path, checkpoint: Path | None = None, *words: str
) -> dict[str, Tensor]:
    (last,) = [checkpoint] if checkpoint else folder.rglob("*.ckpt")
    run(folder, "fit", "--ckpt_path", str(last), "--trainer.max_epochs", "2", *words)
    newest = max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    loaded = torch.load(newest, weights_only=True)
    assert loaded["global_step"] == 4
    return loaded["state_dict"]


@pytest.mark.slow
@QUIET
def test_goes_on_with_two_ranks(tmp_path: Path) -> None:
    """Processes that the Trainer starts go on from the checkpoint and the config of tiles."""
    run(tmp_path / "two", "fit", "--tiles", "2")
    (last,) = (tmp_path / "two").rglob("*.ckpt")
    words = "--tiles null --trainer.devices 2 --trainer.strategy.domain_parallel_size 2"
    more = ["--ckpt_path", str(last), "--trainer.max_epochs", "2", *words.split()]
    started = subprocess.run(
        [sys.executable, "-m", "lightning_shard", "fit", "--config", "config.yaml", *more],
        cwd=tmp_path / "two", text=True, capture_output=True, check=False, timeout=240,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not started.returncode, started.stderr
    newest = max((tmp_path / "two").rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    found = torch.load(newest, weights_only=True)["state_dict"]
    run(tmp_path / "one", "fit")
    for name, value in weights_after_two_epochs(tmp_path / "one").items():
        assert_same(found[name], value, name)


@pytest.mark.slow
@QUIET
@pytest.mark.usefixtures("interruptible")
def test_ends_after_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code and the last words are those of one process, and a report is written."""
    said: list[list[str]] = []
    for name, words in {"one": [], "two": ["--tiles", "2"]}.items():
        callback = ["--trainer.callbacks", f"{HERE}.Interrupt"]
        with pytest.raises(SystemExit) as ended:
            run(tmp_path / name, "fit", *callback, *words)
        assert ended.value.code == 1
        said.append(
            [x for x in capsys.readouterr().err.splitlines() if "eport" in x or "nterru" in x]
        )
        assert "KeyboardInterrupt" in (tmp_path / name / "report.html").read_text()
    assert said[1] == said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", ["tiles", "hybrid_shard", "auto", "lightning_shard.TiledStrategy"]
)
@QUIET
def test_finds_the_strategy(given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A strategy of the configuration keeps its options; tiles are those of --tiles."""
    more = ["--trainer.strategy.shard_dims", "3"] if "." in given else []
    words = ["--tiles", "3", "--trainer.strategy", given, *more, "--trainer.fast_dev_run=1"]
    run(tmp_path, "fit", *words)
    run(tmp_path, "predict", *words)
    assert f"field (dim {3 if more else 2})" in caplog.text


@pytest.mark.slow
@QUIET
def test_finds_the_number_of_tiles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line says the number and the reason; steps of the rehearsal print nothing."""
    monkeypatch.setattr(least_tiles, "free_memory", lambda *_: (1_000_000, "here"))
    words = ["--tiles", "auto", "--tile_memory", str(tmp_path), "--trainer.fast_dev_run", "1"]
    words += ["--data.rows", "900"]
    run(tmp_path, "fit", *words)
    assert re.search(
        r"[2-9] tiles: a step needs [567]\d\d.\d KiB of 732.4 KiB, 75% of", caplog.text
    )
    assert capsys.readouterr().out.count("step 0") == 1
    run(tmp_path, "predict", *words)
    assert re.search(r"note: \d tiles?: a step needs .* KiB, 75% of", capsys.readouterr().err)


@pytest.mark.slow
@QUIET
def test_plans_and_checks_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config of a run in tiles is that of plan and check, too."""
    run(tmp_path, "fit", "--tiles", "2x2", "--trainer.max_steps", "1")
    run(tmp_path, "plan", "--cluster", "1xH100")
    words = capsys.readouterr().out
    assert "2x2 tiles in turns on one device" in words
    assert "NVLink-C2C" in words
    run(tmp_path, "check")
    told = capsys.readouterr()
    assert "2x2 ranks equals that of one process" in told.out
    assert "check compares ranks with one process" in told.err
    for more, said in (
        (["--tiles", "auto"], "give plan a number of tiles, such as --tiles 8"),
        (["--cluster", "8xH100"], "and give a cluster of one device, such as 1xH100"),
    ):
        with pytest.raises(SystemExit):
            run(tmp_path, "plan", *more)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "--tiles", "0"], "tiles must be a number from 1 on"),
        (["predict", "--tiles", "2.5"], "tiles"),
        (["predict", "--tile_memory", "."], "--tile_memory needs --tiles, such as --tiles 8"),
        (["fit", "--tile_budget", "8GB"], "--tile_budget needs --tiles, such as --tiles 8"),
        (["fit", "--tiles", "2", "--tile_budget", "much"], 'a size such as "8GB" or "500MiB"'),
        (["predict", "--tiles", "2", "--tile_memory", "/none"], "give a directory that exists"),
        (["fit", "--tiles", "2x"], "one for each split dim"),
        (["fit", "--tiles", "auto"], "give tile_memory, a directory on a disk, or a number of"),
        (["predict", "--tiles", "auto"], "give tile_memory, a directory on a disk, or a number"),
        (["fit", "--tiles", "aut"], "got 'aut'"),
        (["fit", "--tiles", "eight"], "got 'eight'"),
        (["fit", "--tile", "8"], "did you mean 'tiles'?"),
        (
            ["fit", "--tiles", "2", "--trainer.strategy", "ddp"],
            "--tiles trains by TiledStrategy, but trainer.strategy is ddp; leave it out",
        ),
        (
            ["fit", "--tiles", "2", "--trainer.strategy.domain_parallel_size", "2"],
            "strategy.domain_parallel_size is 2, which splits it over devices; make it 1",
        ),
        (
            ["fit", "--tiles", "2", "--trainer.strategy.sharding.compile_blocks", "true"],
            "compile_blocks hides from tiles",
        ),
        (
            ["predict", "--tiles", "2", "--trainer.devices", "2"],
            "predict computes in tiles on one device, but trainer.devices is 2; make it 1",
        ),
        (
            ["predict", "--tiles", "2", "--trainer.strategy.shard_dims", "{field: 2}"],
            "shard_dims names entries; give numbers of dims",
        ),
    ],
)
def test_refusals(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    with pytest.raises(SystemExit) as ended:
        cli.main([words[0], "--config", str(path), *words[1:]])
    err = capsys.readouterr().err
    assert ended.value.code in (1, 2)
    assert said in err
    assert "Traceback" not in err
