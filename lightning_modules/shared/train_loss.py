"""Logs the loss of a training step: that of the batch, and the mean over the epoch."""

from lightning.pytorch import LightningModule
from torch import Tensor


def log_train_loss(module: LightningModule, loss: Tensor, batch_size: int) -> None:
    """Log `train/loss_step`, this rank's loss, and `train/loss`, the mean over epoch and ranks.

    Only the mean needs a collective, one at the end of each epoch.

    Args:
        module: The module whose training step this is.
        loss: The mean loss over the batch.
        batch_size: Samples of this rank's batch, by which the mean weighs it.
    """
    module.log("train/loss_step", loss, prog_bar=True, batch_size=batch_size)
    module.log(
        "train/loss",
        loss,
        prog_bar=True,
        on_step=False,
        on_epoch=True,
        sync_dist=True,
        batch_size=batch_size,
    )
