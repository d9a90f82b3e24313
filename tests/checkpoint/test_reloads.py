"""A resumed run that asks for loaders in each epoch reads what the run without a break does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests import training
from tests.checkpoint.tiny import SaveAfterBatch, SaveAt, quiet


class Reads(LightningModule):
    """Notes the epochs in which it is asked for a loader, and the samples of each step."""

    def __init__(self, size: int, *, seeded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.size, self.is_seeded = size, seeded
        self.asked: list[int] = []
        self.seen: dict[tuple[int, int], list[int]] = {}

    def train_dataloader(self) -> Any:
        self.asked.append(self.current_epoch)
        own = torch.Generator().manual_seed(3) if self.is_seeded else None
        return DataLoader(range(8), self.size, shuffle=True, generator=own)

    def val_dataloader(self) -> Any:
        return DataLoader(range(2))

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen[self.current_epoch, index] = batch.tolist()
        return self.weight.square()

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(trainer: Trainer, size: int, path: Any = None, *, seeded: bool) -> Reads:
    torch.manual_seed(5)
    module = Reads(size, seeded=seeded)
    with quiet():
        trainer.fit(module, ckpt_path=path, weights_only=True if path else None)
    return module


@pytest.mark.quick_rows("own generator")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("seeded", [False, True], ids=["common numbers", "own generator"])
def test_samples_after_a_resume_are_those_of_one_process(seeded):
    """Saved inside an epoch and at its last batch; with a generator of its own, also at its end."""
    options = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 5}
    quiet_options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu",
                     "enable_progress_bar": False, "enable_model_summary": False}  # fmt: skip
    alone = run(Trainer(devices=1, **quiet_options, **options), 4, seeded=seeded)
    path = training.shared_path("reloads.ckpt")
    saves = [SaveAfterBatch(path, 1, 0), SaveAfterBatch(path, 1, 1), SaveAt(path, 4, "epoch")]
    for save in saves[: 3 if seeded else 2]:
        first = {"callbacks": [save], **options, "max_epochs": 2}
        run(training.trainer((1,), **first), 2, seeded=seeded)
        resumed = run(training.trainer((1,), **options), 2, path, seeded=seeded)
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, resumed.seen)
        found = {
            step: sorted(n for each in everywhere for n in each[step]) for step in resumed.seen
        }
        wanted = {step: sorted(samples) for step, samples in alone.seen.items()}
        assert found == {step: wanted[step] for step in wanted if step >= min(found)}
        assert [e for e in resumed.asked if e > 1] == [e for e in alone.asked if e > 1]
