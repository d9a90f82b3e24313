"""Training in tiles on one device: a Trainer that leaves what one process leaves."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.networks import UNet, ViT
from lightning_shard import (
    ShardingOptions,
    TiledStrategy,
    plan,
)
from tests import training
from tests.parity import assert_same
from tests.training import Fields, Losses, generator

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders and loaders
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
QUIET = {
    "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
STEPS = 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.network = nn.BatchNorm2d(3), UNet(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self.norm(x))


class Plain(LightningModule):
    """Any network, with Adam; `eps` keeps gradients that are zero but for rounding from weights."""

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network().double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.network(batch)
        return (found - batch.mean()).square().mean() + found.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-4)


def picture(index: int) -> Tensor:
    return torch.randn(3, 32, 32, dtype=torch.float64, generator=generator(index))


def loader(samples: int = STEPS, **options: Any) -> DataLoader[Any]:
    return DataLoader(Fields(picture, samples), **options)


def _tfno() -> tuple[LightningModule, Any, Any]:
    return training.make("tfno", torch.float64), training.loader("tfno", torch.float64, 1, 3), None


def _segmentation() -> tuple[LightningModule, Any, Any]:
    from tests.workloads.segmentation.test_model import data, network

    return network(), data(1, num_train=STEPS), None


def _t5() -> tuple[LightningModule, Any, Any]:
    import tempfile

    from tests.workloads.t5.texts import summarizer, texts

    made = texts(Path(tempfile.mkdtemp()) / "tokenizers", 1)
    made.train_dataloader = lambda: made._loader("train", 1)
    return summarizer(torch.float64), made, {"input_ids": 1}


WORKLOADS: dict[str, Callable[[], tuple[LightningModule, Any, Any]]] = {
    "unet": lambda: (Plain(Normed), loader(), None),
    "vit": lambda: (Plain(lambda: ViT(32, 2, 2)), loader(), None),
    "tfno": _tfno,
    "segmentation": _segmentation,
    "t5": _t5,
}
QUICK = [("unet", 2), ("tfno", 2), ("segmentation", 2)]  # a ViT waits in files, below
CASES = [
    pytest.param(name, tiles, marks=() if (name, tiles) in QUICK else pytest.mark.slow)
    for name in WORKLOADS
    for tiles in (2, 4, 8, (2, 2))
    if (name, tiles) != ("t5", (2, 2))  # texts have one dim
]


def fit(workload: str, accelerator: str = "cpu", tiles: Any = None, **options: Any) -> Any:
    module, data, dims = WORKLOADS[workload]()
    losses = Losses()
    strategy = "auto" if tiles is None else TiledStrategy(tiles, shard_dims=dims, **options)
    runner = Trainer(
        accelerator=accelerator, max_steps=STEPS, strategy=strategy, callbacks=[losses],
        limit_val_batches=0, **QUIET,
    )  # fmt: skip
    runner.fit(module, data)
    assert len(losses.values) == STEPS
    return losses.values, module.state_dict()


def compare(workload: str, accelerator: str, tiles: Any, **options: Any) -> None:
    wanted, one = fit(workload)
    found, all_ = fit(workload, accelerator, tiles, **options)
    assert_same(torch.tensor(found), torch.tensor(wanted))
    assert all_.keys() == one.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert_same(_double(all_[name]), _double(value), name)


def _double(value: Tensor) -> Tensor:
    return value.cpu() if value.is_complex() else value.cpu().double()


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "tiles"), CASES)
def test_trains_as_one_process(workload: str, tiles: Any) -> None:
    compare(workload, "cpu", tiles)


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_trains_on_a_device() -> None:
    compare("vit", "xpu", 2, tile_budget="100KiB")


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_trains_all_on_a_device(workload: str) -> None:
    compare(workload, "xpu", 4)


@pytest.mark.slow
def test_waits_in_files(tmp_path: Path) -> None:
    compare("vit", "cpu", 2, tile_memory=str(tmp_path))
    assert [*tmp_path.iterdir()] == []


class Told(Callback):
    """What a callback sees; it lets Ctrl-C come where a test asks for it."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.steps, self.interrupt_at = 0, interrupt_at

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.steps += 1
        if trainer.is_global_zero and self.steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # until the main thread has it


class Stranger(LightningModule):
    """A module with noise, counters, words and all steps."""

    def __init__(self, *, is_noisy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_noisy = is_noisy
        self.first = nn.Conv2d(3, 8, 3, padding=1).double()
        self.norm = nn.GroupNorm(2, 8).double()
        self.last = nn.Conv2d(8, 3, 3, padding=1).double()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.0
        if self.is_noisy:
            noise = torch.rand(8, 1, 1, dtype=x.dtype, device=x.device)  # of the field as a whole
        return self.last(torch.tanh(self.norm(self.first(x))) + noise)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        print("step", batch_idx, tuple(batch.shape))
        loss = (self(batch) - batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", (self(batch) - batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", (self(batch) - batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), 1e-2, eps=1e-4)
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)]


class Counted(Fields):
    """Counts in a file what is read, in whatever process."""

    def __init__(self, count: Path) -> None:
        super().__init__(picture, 4)
        self.count = count

    def __getitem__(self, index: int) -> Any:
        with self.count.open("a") as file:
            print(os.getpid(), file=file)
        return super().__getitem__(index)


def strategy_of(accelerator: str, tiles: Any, **options: Any) -> Any:
    """In tiles, or in one process by the strategy that trains on the device."""
    if tiles is None:
        return "auto" if accelerator == "cpu" else "hybrid_shard"
    return TiledStrategy(tiles, **options)


def runner_of(folder: Path, accelerator: str, tiles: Any, **options: Any) -> Trainer:
    callbacks = [
        Told(),
        ModelCheckpoint(folder, monitor="val", save_last=True),
        EarlyStopping("val"),
    ]
    return Trainer(
        accelerator=accelerator, devices=1, logger=CSVLogger(folder, "", ""), log_every_n_steps=1,
        strategy=strategy_of(accelerator, tiles), callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip


def all_stages(folder: Path, accelerator: str, tiles: Any) -> tuple[dict[str, Any], Any]:
    """Train, test and train on; return what is seen of it, and the tensors."""
    module, count = Stranger(is_noisy=True), folder / "read"
    runner = runner_of(folder, accelerator, tiles, max_epochs=2)

    def loader(**options: Any) -> DataLoader[Any]:
        return DataLoader(Counted(count), 2, shuffle=True, **options)

    torch.manual_seed(3)
    runner.fit(module, loader(), loader())
    seen: dict[str, Any] = {"read": len(count.read_text().split())}
    tested = runner.test(module, loader(), verbose=False)
    assert runner.fit_loop.max_epochs is not None
    runner.fit_loop.max_epochs += 1
    count.write_text("")
    workers = {"num_workers": 2, "persistent_workers": True}
    runner.fit(module, loader(**workers), loader(**workers))
    (callback,) = (c for c in runner.callbacks if isinstance(c, Told))  # pyright: ignore
    seen |= {
        "workers": len({*count.read_text().split()}), "steps": module.steps,
        "called": callback.steps, "global_step": runner.global_step,
        "files": sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()),
        "best": Path(runner.checkpoint_callbacks[0].best_model_path).name,  # pyright: ignore
        "rows": len((folder / "metrics.csv").read_text().split()),
        "types": {type(p) for p in module.parameters()}, "training": module.training,
    }  # fmt: skip
    state = runner.optimizers[0].state_dict()["state"]
    values = {
        "test": tested[0]["test"], **runner.callback_metrics, **module.state_dict(),
        **{f"moment {n}": each["exp_avg_sq"] for n, each in state.items()},
        "drawn afterwards": torch.rand(3, dtype=torch.float64),
    }  # fmt: skip
    return seen, values


def assert_all_stages(folder: Path, accelerator: str, tiles: Any) -> None:
    (folder / "one").mkdir()
    (folder / "tiles").mkdir()
    seen, one = all_stages(folder / "one", accelerator, None)
    found, all_ = all_stages(folder / "tiles", accelerator, tiles)
    assert found == seen
    assert all_.keys() == one.keys()
    for name, value in one.items():
        assert_same(torch.as_tensor(all_[name]).cpu(), torch.as_tensor(value).cpu(), name)


def test_is_one_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One log, one checkpoint, data read once, by one set of workers; words are printed once."""
    assert_all_stages(tmp_path, "cpu", (2, 2))
    words = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(words) == 2 * 6
    assert words[:6] == words[6:]


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_is_one_trainer_on_a_device() -> None:
    """Random numbers of the device go on as those of one process."""
    import tempfile

    assert_all_stages(Path(tempfile.mkdtemp()), "xpu", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(None, 2), (2, None), pytest.param(2, (2, 2), marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_that_of_one_process(tmp_path: Path, first: Any, then: Any) -> None:
    whole, half = Stranger(), Stranger()
    data = DataLoader(Fields(picture, 4), 2)
    (tmp_path / "whole").mkdir()
    runner_of(tmp_path / "whole", "cpu", None, max_epochs=2).fit(whole, data, data)
    runner_of(tmp_path, "cpu", first, max_epochs=1).fit(half, data, data)
    on = Stranger()
    runner = runner_of(tmp_path, "cpu", then, max_epochs=2)
    runner.fit(on, data, data, ckpt_path=tmp_path / "last.ckpt")
    assert runner.global_step == 4
    for name, value in whole.state_dict().items():
        assert_same(on.state_dict()[name], value, name)


@pytest.mark.slow
def test_ends_between_steps_after_ctrl_c() -> None:
    """The module is then what it was after the last step."""
    wanted, found = Stranger(), Stranger()
    Trainer(accelerator="cpu", max_steps=2, **QUIET).fit(wanted, loader())
    runner = Trainer(
        accelerator="cpu", max_epochs=1, strategy=TiledStrategy(2),
        callbacks=[Told(interrupt_at=2)], **QUIET,
    )  # fmt: skip
    with pytest.raises(SystemExit):
        runner.fit(found, loader(5))
    assert runner.interrupted
    for name, value in wanted.state_dict().items():
        assert_same(found.state_dict()[name], value, name)


class InPlace(Stranger):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.div_(2)


class Locked(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Unlocked(Stranger):
    def setup(self, stage: str) -> None:
        self.lock = threading.Lock()


class Broken(Stranger):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise LookupError("a mistake of the module")


def train(module: LightningModule, strategy: Any = None, **options: Any) -> None:
    options = {"accelerator": "cpu", "max_steps": 1, **QUIET} | options
    Trainer(strategy=strategy or TiledStrategy(2), **options).fit(module, loader())


@pytest.mark.slow
def test_refuses_what_it_cannot() -> None:
    with pytest.raises(ValueError, match=r"tiles must be a number from 1 on.*got 0"):
        TiledStrategy(0)
    with pytest.raises(ValueError, match="do not go with domain_parallel_size; leave it out"):
        TiledStrategy(2, domain_parallel_size=2)
    with pytest.raises(ValueError, match="not the 1 process; use data_parallel_size 1 or auto"):
        train(Stranger(), TiledStrategy(2, data_parallel_size=2))
    with pytest.raises(ValueError, match="compile_blocks hides from tiles"):
        TiledStrategy(2, sharding=ShardingOptions(compile_blocks=True))
    with pytest.raises(ValueError, match=r'leave it out, and give tile_budget, such as "8GB"'):
        TiledStrategy(2, sharding=ShardingOptions(activation_offload=True))
    with pytest.raises(ValueError, match="activation_offload moves what tiles move already"):
        plan(Stranger(), loader(), tiles=2, activation_offload=True)
    with pytest.raises(ValueError, match="give a directory that exists"):
        TiledStrategy(2, tile_memory="/nowhere/at/all")
    with pytest.raises(ValueError, match=r"tile_budget must be a size such as .* got 'much'\.$"):
        TiledStrategy(2, tile_budget="much")
    train(InPlace())  # hooks write into the batch once
    train(Locked())  # nothing is copied
    with pytest.raises(LookupError, match="a mistake of the module"):
        train(Broken())
    train(Stranger(), TiledStrategy(3), max_steps=2, fast_dev_run=True)


class FollowsMean(Plain):
    """Subtracts a running mean of its rows, which is a buffer."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Conv2d(3, 3, 3, padding=1))
        self.register_buffer("rows", torch.zeros(1, 3, 13, 1, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rows.lerp_(batch.mean((0, 3), keepdim=True), 0.1)
        return super().training_step(batch - self.rows, batch_idx)


def test_buffers_that_are_written_are_those_of_one_process(tmp_path: Path) -> None:
    """In checkpoints, in a second stage, and after it; they have the extent of the fields."""
    states = []
    fields = Fields(lambda i: torch.randn(3, 13, 9, generator=generator(i)).double(), 6)
    for name, strategy in {"alone": "auto", "tiles": TiledStrategy(3)}.items():
        module, folder = FollowsMean(), tmp_path / name
        keeps = ModelCheckpoint(folder, filename="kept", every_n_train_steps=2)
        options = {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": True}
        runner = Trainer(**QUIET | options, strategy=strategy, callbacks=[keeps])
        runner.fit(module, DataLoader(fields, 2))
        runner.fit_loop.max_epochs = 2
        runner.fit(module, DataLoader(fields, 2))
        saved = torch.load(folder / "kept.ckpt", weights_only=True)["state_dict"]
        states.append(module.state_dict() | {f"saved {key}": value for key, value in saved.items()})
        assert type(module.rows) is Tensor
    alone, tiles = states
    assert alone.keys() == tiles.keys()
    for key, value in alone.items():
        assert_same(tiles[key], value)
