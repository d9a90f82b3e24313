"""Measures what the loop of a Trainer takes for a step, beside what the step computes."""

import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.lab.run import QUIET, quiet
from lightning_shard.lightning import LightningEnvironment, LightningModule, Trainer

STEPS = 50


class _Small(LightningModule):
    """Computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the sum of one product."""
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one without state."""
        return torch.optim.SGD(self.parameters(), 0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the moment."""
        self.ends.append(time.perf_counter())


def seconds_of_a_loop() -> float:
    """Return the seconds of the host for a step in a Trainer, less those of the bare step.

    The quickest of several steps counts: other work on the machine can only lengthen one.
    """
    module = _Small()
    samples: Any = [torch.ones(1, device="cpu")] * STEPS
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        alone = LightningEnvironment()  # whatever a launcher has set
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=STEPS, plugins=alone, **QUIET)
        trainer.fit(module, DataLoader(samples, batch_size=None))
    optimizer, bare = module.configure_optimizers(), list[float]()
    for number, sample in enumerate(samples):
        begin = time.perf_counter()
        optimizer.zero_grad()
        module.training_step(sample, number).backward()
        optimizer.step()
        bare.append(time.perf_counter() - begin)
    return max(0.0, min(b - a for a, b in pairwise(module.ends)) - min(bare))
