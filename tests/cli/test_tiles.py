"""`predict --tiles`: predictions are those of one process, and what cannot be is refused."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.cli import main as cli
from tests.cli.test_errors import HybridShardStrategy as HybridShardStrategy
from tests.parity import assert_same

HERE = __name__
CONFIG = f"""\
trainer:
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

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        assert self.trainer.predicting
        return {"field": self.layers(batch["field"]).tanh(), "name": batch["name"][0]}


class Data(LightningDataModule):
    def predict_dataloader(self) -> DataLoader[Any]:
        numbers = torch.Generator().manual_seed(1)
        fields = [torch.randn(2, 19, 12, generator=numbers).double() for _ in range(2)]
        return DataLoader([{"field": x, "name": str(n)} for n, x in enumerate(fields)])


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


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_predicts_in_tiles(tmp_path: Path) -> None:
    wanted = predicted(tmp_path, "--trainer.strategy", "auto")
    for words in (["8"], ["[2,3]"], ["3", "--tile_memory", str(tmp_path)]):
        found = predicted(tmp_path, "--tiles", *words)
        assert [x["name"] for x in found] == ["0", "1"]
        for got, want in zip(found, wanted, strict=True):
            assert_same(got["field"], want["field"])
    assert {path.name for path in tmp_path.iterdir()} == {"given.yaml", "config.yaml"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["predict", "--tiles", "0"], "tiles must be a number from 1 on"),
        (["predict", "--tiles", "2.5"], "tiles"),
        (["predict", "--tile_memory", "."], "--tile_memory needs --tiles, such as --tiles 8"),
        (["predict", "--tiles", "2", "--tile_memory", "/none"], "give a directory that exists"),
        (["test", "--tiles", "2"], "--tiles serves predict, not test; leave it out"),
        (
            ["predict", "--tiles", "2", "--trainer.devices", "2"],
            "tiles share one device, but trainer.devices is 2; make it 1",
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
