"""Error curves of a TFNO on Darcy flow: one process, two domain ranks, neuraloperator's Trainer.

All see the same data, network, optimizer and schedule; the first two also the same batches in the
same order, so their curves must be one. `python -m benchmarks.darcy_quality` prints the table and
draws docs/images/darcy_quality.png.
"""

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from neuralop import H1Loss, LpLoss
from neuralop import Trainer as NeuralopTrainer
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.common import describe, start, table
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


def data_of(samples: int) -> DarcyDataModule:
    return DarcyDataModule(RESOLUTION, [RESOLUTION], samples, 64, 8, batch_size=8)


def module_of(epochs: int) -> TFNODarcy:
    def schedule(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, T_max=epochs)

    return TFNODarcy((16, 16), 16, lr_scheduler=schedule)


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
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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


def neuraloperators(epochs: int, samples: int) -> list[float]:
    """The curve of neuraloperator's own Trainer."""
    seed_everything(0, verbose=False)
    data, module = data_of(samples), module_of(epochs)
    data.prepare_data()
    data.setup("fit")
    module.configure_model()
    stats, network = data.stats, module.network
    assert stats is not None
    assert network is not None
    shape = (1, 1, 1, 1)
    normalizers = [
        UnitGaussianNormalizer(torch.full(shape, mean), torch.full(shape, std), eps=0.0)
        for mean, std in ((stats.x_mean, stats.x_std), (stats.y_mean, stats.y_std))
    ]
    optimizer = module.make_optimizer(network.parameters())
    trainer = Recorder(
        model=network,
        n_epochs=epochs,
        data_processor=DefaultDataProcessor(*normalizers),
    )
    trainer.train(
        data.train_dataloader(),
        {"val": data.val_dataloader()[0]},
        optimizer,
        CosineAnnealingLR(optimizer, T_max=epochs),
        training_loss=H1Loss(d=2),
        eval_losses={"l2": LpLoss(d=2)},
    )
    return trainer.errors


def draw(curves: dict[str, Sequence[float]], path: Path) -> None:
    styles = {"one process": "-", "two domain ranks": "o", "neuraloperator's Trainer": "--"}
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, errors in curves.items():
        axes.plot(range(1, len(errors) + 1), errors, styles[name], label=name, fillstyle="none")
    axes.set(xlabel="epoch", ylabel=f"relative L2 error at {RESOLUTION} x {RESOLUTION}")
    axes.set_yscale("log")
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
    apart = [abs(a - b) / a for a, b in zip(*list(curves.values())[:2], strict=True)]
    rows = [(i + 1, *(f"{c[i]:.5f}" for c in curves.values())) for i in range(options.epochs)]
    table(["epoch", *curves], rows)
    print(f"largest relative difference of the first two: {max(apart):.1e}")
    draw(curves, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
