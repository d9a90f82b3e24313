"""A replica in tiles, which is killed within a step, or has other tiles than the other one."""

import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, TiledStrategy


class Module(LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.fault = torch.nn.Conv2d(1, 1, 3, padding=1), fault

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fault == "kill" and batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise" and batch_idx == 1 and self.global_rank == 1:
            raise LookupError("a mistake of the module")
        if self.fault == "stop" and batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return self.layer(batch).square().mean()

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            print("ended after step", self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main(fault: str) -> None:
    rank = int(os.environ["RANK"])
    strategy: HybridShardStrategy = TiledStrategy(4 if fault == "tiles" and rank else 2)
    if fault == "strategy" and rank:
        strategy = HybridShardStrategy()
    runner = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    fields: Any = torch.randn(20, 1, 8, 8)
    runner.fit(Module(fault), DataLoader(fields))


if __name__ == "__main__":
    main(sys.argv[1])
