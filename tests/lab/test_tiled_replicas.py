"""Processes whose tiles take turns, as data replicas of each other."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError

from benchmarks.networks import UNet
from lightning_shard import HybridShardStrategy, TiledStrategy
from lightning_shard.checkpoint.state import full_module_state
from tests import pool
from tests.lab import replica
from tests.parity import assert_same
from tests.training import Fields, generator, shared_path

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders and loaders
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


def picture(index: int) -> tuple[int, Tensor]:
    return index, torch.randn(3, 16, 16, dtype=torch.float64, generator=generator(index))


def loader(samples: int, batch_size: int = 1) -> DataLoader[Any]:
    return DataLoader(Fields(picture, samples), batch_size)


def small(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm, nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)
    )


class Module(LightningModule):
    """A network with a metric, values that are logged, and a list of what is read."""

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network().double()
        self.error = MeanAbsoluteError().double()
        self.read: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        _, x = batch
        found = self.network(x)
        self.error(found, torch.zeros_like(found))
        return found.square().mean() + found.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.read += batch[0].tolist()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-4)


def runner_of(folder: Path, strategy: Any, **options: Any) -> Trainer:
    options = {"max_epochs": 1} | options
    return Trainer(
        accelerator="cpu", devices=2, plugins=[TorchElasticEnvironment()], strategy=strategy,
        logger=CSVLogger(folder, "", ""), callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        default_root_dir=folder, **options,
    )  # fmt: skip


def all_stages(folder: Path, strategy: Any, network: Any) -> tuple[dict[str, Any], Any, list[Any]]:
    """Train, validate, test and predict; return what is seen, the tensors, and the predictions."""
    module = Module(network)
    runner = runner_of(folder, strategy, accumulate_grad_batches=2, gradient_clip_val=0.1)
    runner.fit(module, loader(12), loader(4))
    assert runner.global_step == 3
    values = {**runner.callback_metrics, **full_module_state(module)}
    tested = runner.test(module, loader(4), verbose=False)
    predicted: Any = runner.predict(module, loader(4))
    files = sorted(f.name for f in folder.rglob("*") if f.is_file())
    rows = (folder / "metrics.csv").read_text().split()[:1]
    seen = {"read": module.read, "tested": [*tested[0]], "files": files, "columns": rows}
    return seen, values | {"test": torch.tensor(tested[0]["test"])}, predicted


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: small(nn.BatchNorm2d(4)),
    "unet": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), UNet(8)),
}


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("network", "tiles"), [("small", 2), pytest.param("unet", 4, marks=pytest.mark.slow)]
)
def test_leaves_what_plain_replicas_leave(network: str, tiles: int) -> None:
    """Logs, metrics, one checkpoint, predictions, and batch norm's statistics of each replica."""
    folder, make = shared_path("both"), NETWORKS[network]
    seen, wanted, plain = all_stages(folder / "plain", HybridShardStrategy(), make)
    found, values, tiled = all_stages(folder / "tiles", TiledStrategy(tiles), make)
    assert found == seen
    rank = torch.distributed.get_rank()
    assert found["read"] == [*range(rank, 12, 2)]  # each sample once, by its own replica
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same(values[name].double(), value.double(), name)
    for one, other in zip(tiled, plain, strict=True):
        assert_same(one, other)


def trained_alone(epochs: int) -> dict[str, Tensor]:
    """Train by a loop of one process, two samples a step."""
    module = Module(lambda: small(nn.GroupNorm(2, 4)))
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for batch in loader(6, 2):
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
    return module.network.state_dict()


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("tiles_first", [True, False])
def test_goes_on_from_ranks_and_back(tiles_first: bool) -> None:
    """Two replicas in tiles and a domain of two ranks go on from each other, as one process."""
    folder = shared_path("runs")
    ways = [(TiledStrategy(2), 1), (HybridShardStrategy(domain_parallel_size=2), 2)]
    checkpoint, module = None, None
    for epochs, (strategy, size) in enumerate(ways if tiles_first else ways[::-1], 1):
        module = Module(lambda: small(nn.GroupNorm(2, 4)))
        runner = runner_of(folder / str(epochs), strategy, max_epochs=epochs)
        runner.fit(module, loader(6, size), ckpt_path=checkpoint)
        checkpoint = folder / str(epochs) / "last.ckpt"
    assert module is not None
    found = full_module_state(module.network)
    for name, value in trained_alone(2).items():
        assert_same(found[name], value, name)


def _run(fault: str, rank: int, port: int, folder: Path) -> None:
    sys.stderr = (folder / f"output_{rank}").open("w", buffering=1)  # not that of pytest
    os.dup2(sys.stderr.fileno(), 2)
    pool.begin(rank, 2, port)
    replica.main(fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill", "one rank failed first: rank 1: ended without a word"),
        ("raise", "one rank failed first: rank 1: LookupError: a mistake of the module"),
        ("tiles", "the number of tiles is 2 on rank 0 and 4 on rank 1; start all ranks with"),
        ("strategy", "the number of tiles is 2 on rank 0 and not there on rank 1; start all"),
        ("stop", "one rank failed first: rank 1: KeyboardInterrupt"),
    ],
)
def test_ends_together(fault: str, said: str, tmp_path: Path) -> None:
    """Both replicas end, with a sentence, after a fault of one of them."""
    context, port = multiprocessing.get_context("fork"), pool.free_port()
    processes = [
        context.Process(target=_run, args=(fault, rank, port, tmp_path)) for rank in (0, 1)
    ]
    pool.start_all(processes)
    for process in processes:
        process.join(timeout=90)
        assert process.exitcode not in (0, None)
    assert said in (tmp_path / "output_0").read_text()
