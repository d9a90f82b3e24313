"""A module with one of everything, trained by Lightning on one process and by the strategy."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.training import Fields, generator

BATCH = 4
SAMPLES = 24


def sample(index: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, 1, 9, 7, generator=generator(index), dtype=torch.float64)
    return {"x": x, "y": y}


class Featured(LightningModule):
    """A network, a parameter and a number of the LightningModule itself, and metrics."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda c: nn.GroupNorm(2, c)) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, dtype=torch.float64),
            norm(4).double(),
            nn.GELU(),
            nn.Conv2d(4, 1, 3, padding=1, dtype=torch.float64),
        )
        self.weight = nn.Parameter(torch.ones(1, 3, 1, dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 1, H, W)."""
        return self.network(x) * self.weight.sum() + self.offset

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(batch_size: int, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(Fields(sample, samples), batch_size)


QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def fit_alone(module: LightningModule, **options: Any) -> Trainer:
    """Lightning's own strategy for one process, in every rank."""
    runner = Trainer(devices=1, plugins=LightningEnvironment(), **(QUIET | options))
    runner.fit(module, loader(BATCH), loader(BATCH))
    return runner


def fit_sharded(module: LightningModule, domain: tuple[int, ...], **options: Any) -> Trainer:
    runner = training.trainer(domain, **options)
    size = BATCH * runner.strategy.domain_size // dist.get_world_size()  # pyright: ignore
    runner.fit(module, loader(size), loader(size))
    return runner


def assert_same_state(
    module: LightningModule, expected: LightningModule | dict[str, Tensor]
) -> None:
    found = full_module_state(module)
    state = expected if isinstance(expected, dict) else expected.state_dict()
    for key, value in state.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}"
        )


def assert_same_metrics(runner: Trainer, expected: Trainer | dict[str, Tensor]) -> None:
    metrics = expected if isinstance(expected, dict) else expected.callback_metrics
    assert runner.callback_metrics.keys() == metrics.keys()
    for key, value in metrics.items():
        # Lightning logs float32
        torch.testing.assert_close(
            runner.callback_metrics[key], value, rtol=1e-6, atol=0, check_dtype=False
        )
