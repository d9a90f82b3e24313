"""A tensorized Fourier neural operator that maps permeability to pressure of Darcy flow.

Ordinary Lightning code: it sees whole fields and only torch functions, so a strategy may hand it
tensors whose rows or columns are split over ranks.

Shapes: B samples, H = W nodes a side. All fields are (B, 1, H, W).

Source: Kossaifi et al., "Multi-Grid Tensorized Fourier Neural Operator for High-Resolution PDEs"
(https://arxiv.org/abs/2310.00120); network and losses are neuraloperator's.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from neuralop import H1Loss, LpLoss
from neuralop.models import TFNO
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from typing_extensions import override

from lightning_modules.darcy.data import DarcyDataModule
from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.train_loss import log_train_loss

Batch = dict[str, Tensor]


# Not a lambda: jsonargparse would turn it into init_args, which survive a change of class in YAML.
def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make Adam with learning rate 5e-3 and weight decay 1.25e-5.

    Such a decay of the mean loss weighs as 1e-4 does in neuraloperator's examples, which sum the
    loss over a batch of 8.
    """
    return Adam(parameters, lr=5e-3, weight_decay=1.25e-5)


class TFNODarcy(LightningModule):
    """Trains a factorized FNO for Darcy flow on the relative H1 or L2 error.

    Evaluation logs relative errors per resolution, such as `val/l2_64` and `test/h1_128`, and
    beside them those of a trivial guess, the mean training solution (`test/l2_64_baseline`).
    `val/loss` is the training loss on the first validation set.

    Args:
        n_modes: Fourier modes kept along H and W.
        hidden_channels: Channels of every Fourier layer.
        n_layers: Number of Fourier layers.
        rank: Parameters of each factorized spectral weight, as a fraction of the dense one.
        lifting_channel_ratio: Width of the lifting network, in units of `hidden_channels`.
        projection_channel_ratio: Width of the projection network, in units of `hidden_channels`.
        loss: Relative error to train on, "h1" (value and gradient) or "l2" (value).
        factorization: Form of the spectral weights: "tucker", "cp" or "tt", or "dense" without one.
        positional_embedding: "grid": the network also sees two channels of coordinates, which
            neuraloperator once called positional encoding; None: it sees the permeability alone.
        optimizer: Makes the optimizer of the parameters; Adam with lr 5e-3 and weight decay
            1.25e-5 by default. Not stored in checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; none by
            default. Not stored in checkpoints.
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor
    mean_solution: Tensor | None

    def __init__(
        self,
        n_modes: tuple[int, int] = (12, 12),
        hidden_channels: int = 24,
        n_layers: int = 4,
        rank: float = 0.4,
        lifting_channel_ratio: float = 2,
        projection_channel_ratio: float = 2,
        loss: Literal["h1", "l2"] = "h1",
        factorization: Literal["tucker", "cp", "tt", "dense"] = "tucker",
        positional_embedding: Literal["grid"] | None = "grid",
        optimizer: OptimizerCallable = adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        at_least(1, n_modes=n_modes, hidden_channels=hidden_channels, n_layers=n_layers)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.network: TFNO | None = None
        self.network_options: dict[str, Any] = {
            "n_modes": tuple(n_modes),
            "in_channels": 1,
            "out_channels": 1,
            "hidden_channels": hidden_channels,
            "n_layers": n_layers,
            "lifting_channel_ratio": lifting_channel_ratio,
            "projection_channel_ratio": projection_channel_ratio,
            "positional_embedding": positional_embedding,
            "factorization": None if factorization == "dense" else factorization,
            "implementation": "factorized",
            "rank": rank,
        }
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        # a sum over the batch would make gradients depend on how many ranks share it
        self.errors = {"h1": H1Loss(d=2, reduction="mean"), "l2": LpLoss(d=2, reduction="mean")}
        self.loss = self.errors[loss]
        for name, value in (("x_mean", 0.0), ("x_std", 1.0), ("y_mean", 0.0), ("y_std", 1.0)):
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("mean_solution", None, persistent=False)
        self.register_state_dict_post_hook(_drop_network_metadata)

    @override
    def configure_model(self) -> None:
        if self.network is None:
            self.network = TFNO(**self.network_options)

    @override
    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, DarcyDataModule) or data.stats is None:
            return
        self.mean_solution = data.stats.mean_solution[None].to(self.device)
        if stage == "fit":  # later stages keep the scalars the network was trained with
            for name in ("x_mean", "x_std", "y_mean", "y_std"):
                getattr(self, name).fill_(getattr(data.stats, name))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Predict the pressure of a permeability: (B, 1, H, W) -> (B, 1, H, W)."""
        assert self.network is not None, "configure_model runs first"
        encoded = self.network((x - self.x_mean) / self.x_std)
        return encoded * self.y_std + self.y_mean

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self(batch["x"]), batch["y"])
        log_train_loss(self, loss, len(batch["x"]))
        return loss

    @override
    def validation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        return self._shared_step("val", batch, dataloader_idx)

    @override
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return self._shared_step("test", batch, dataloader_idx)

    @override
    def predict_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor]:
        return {**batch, "prediction": self(batch["x"])}

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def _shared_step(self, stage: str, batch: Batch, dataloader_idx: int) -> dict[str, Tensor]:
        """Predict a batch and log its errors, beside those of the mean training solution."""
        y, prediction = batch["y"], self(batch["x"])
        values = self._errors(stage, prediction, y)
        if self.mean_solution is not None:
            mean = F.interpolate(
                self.mean_solution, size=y.shape[-2:], mode="bilinear", align_corners=True
            )
            values |= self._errors(stage, mean + torch.zeros_like(y), y, suffix="_baseline")
        if stage == "val" and dataloader_idx == 0:
            self._log_epoch({"val/loss": self.loss(prediction, y)}, len(y), prog_bar=True)
        self._log_epoch(values, len(y))
        return {**batch, "prediction": prediction}

    def _errors(
        self, stage: str, prediction: Tensor, y: Tensor, *, suffix: str = ""
    ) -> dict[str, Tensor]:
        """Compute relative errors of physical fields, named by stage, norm and resolution."""
        return {
            f"{stage}/{norm}_{y.shape[-1]}{suffix}": error(prediction, y)
            for norm, error in self.errors.items()
        }

    def _log_epoch(
        self, values: dict[str, Tensor], batch_size: int, *, prog_bar: bool = False
    ) -> None:
        self.log_dict(
            values,
            prog_bar=prog_bar,
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=batch_size,
            add_dataloader_idx=False,
        )


def _drop_network_metadata(
    module: LightningModule, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Remove the non-tensor that neuraloperator 2.0.0's `BaseModel.state_dict` adds."""
    state.pop("_metadata", None)
