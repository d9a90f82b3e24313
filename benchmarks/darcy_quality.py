"""Error curves of a TFNO on Darcy flow: one process, two domain ranks, neuraloperator's Trainer.

All see the same data in the same batches and order, first weights, loss, optimizer and schedule, so
their curves must be one, up to rounding that training amplifies. `python -m
benchmarks.darcy_quality` prints the table and draws docs/images/darcy_quality.png.
"""

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from neuralop import LpLoss
from neuralop import Trainer as NeuralopTrainer
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset

from benchmarks.common import QUIET, describe, start, table
from lightning_modules import DarcyDataModule, TFNODarcy
from lightning_shard import HybridShardStrategy

RESOLUTION = 64
METRIC = f"val/l2_{RESOLUTION}"


class Curve(Callback):
    """The validation error after each epoch."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the error."""
        if not trainer.sanity_checking:
            self.errors.append(float(trainer.callback_metrics[METRIC]))


class SeededDarcy(DarcyDataModule):
    """Darcy flow in one order, which is the same in all epochs and under both Trainers.

    A loader that shuffles draws from its generator more often under Lightning than by itself.
    """

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """Shuffle once."""
        batches = super().train_dataloader()
        data: Any = batches.dataset
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        return DataLoader(Subset(data, order.tolist()), batches.batch_size)


def data_of(samples: int) -> DarcyDataModule:
    return SeededDarcy(RESOLUTION, [RESOLUTION], samples, 64, 8, batch_size=8)


def module_of(epochs: int) -> TFNODarcy:
    """The model of configs/tfno_darcy.yaml, with first weights that are always the same."""

    def schedule(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, T_max=epochs)

    return SeededTFNO((16, 16), 16, lr_scheduler=schedule)


class SeededTFNO(TFNODarcy):
    """A TFNO that does not depend on what drew random numbers before."""

    def configure_model(self) -> None:
        """Make the network."""
        seed_everything(0, verbose=False)
        super().configure_model()


def ours(ranks: int, epochs: int, samples: int) -> list[float]:
    """The curve of a run on `ranks` domain ranks; called on each of them."""
    local = {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ |= local | {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    seed_everything(0, verbose=False)
    curve = Curve()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=HybridShardStrategy(domain_parallel_size=ranks),
        max_epochs=epochs,
        callbacks=[curve],
        **QUIET,
    )
    trainer.fit(module_of(epochs), data_of(samples))
    return curve.errors


class Recorder(NeuralopTrainer):
    """neuraloperator's Trainer, which returns the errors of the last epoch only."""

    def evaluate_all(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Keep the error."""
        metrics = super().evaluate_all(*args, **kwargs)
        self.errors = [*getattr(self, "errors", []), float(metrics["val_l2"])]
        return metrics


class Alone(nn.Module):
    """The model as neuraloperator's Trainer calls it: with the whole sample."""

    def __init__(self, model: TFNODarcy) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return self.model(x)


def neuraloperators(epochs: int, samples: int) -> list[float]:
    """The curve of neuraloperator's own Trainer."""
    data, model = data_of(samples), module_of(epochs)
    data.prepare_data()
    data.setup("fit")
    model.configure_model()
    assert data.stats is not None
    for name in ("x_mean", "x_std", "y_mean", "y_std"):
        getattr(model, name).fill_(getattr(data.stats, name))
    optimizer = model.make_optimizer(model.parameters())
    trainer = Recorder(model=Alone(model), n_epochs=epochs, data_processor=DefaultDataProcessor())
    trainer.train(
        data.train_dataloader(),
        {"val": data.val_dataloader()[0]},
        optimizer,
        CosineAnnealingLR(optimizer, T_max=epochs),
        training_loss=_of_fields(model.loss),
        eval_losses={"l2": _of_fields(LpLoss(d=2))},
    )
    return trainer.errors


def _of_fields(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """`loss` as that Trainer calls it: with the whole sample."""
    return lambda prediction, y, **_: loss(prediction, y)


def draw(curves: dict[str, Sequence[float]], path: Path) -> None:
    styles = {"one process": "-", "two domain ranks": "o", "neuraloperator's Trainer": "x"}
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, errors in curves.items():
        percent = [100 * error for error in errors]
        axes.plot(range(1, len(errors) + 1), percent, styles[name], label=name, fillstyle="none")
    axes.set(xlabel="epoch", ylabel="relative L2 error (%)")
    axes.set_title(f"Darcy flow, validation at {RESOLUTION} x {RESOLUTION} grid points")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/darcy_quality.png"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    describe()
    data_of(options.samples).prepare_data()  # once, not on every rank
    curves = {
        "one process": start(1, ours, 1, options.epochs, options.samples),
        "two domain ranks": start(2, ours, 2, options.epochs, options.samples),
        "neuraloperator's Trainer": neuraloperators(options.epochs, options.samples),
    }
    first, *others = curves.values()
    apart = [max(abs(a - b) / a for a, b in zip(first, c, strict=True)) for c in others]
    rows = [(i + 1, *(f"{c[i]:.5f}" for c in curves.values())) for i in range(options.epochs)]
    table(["epoch", *curves], rows)
    print(f"largest relative differences from the first: {apart[0]:.1e}, {apart[1]:.1e}")
    draw(curves, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
