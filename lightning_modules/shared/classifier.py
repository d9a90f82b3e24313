"""Trains classifiers of images: their steps, and the metrics that these log.

Shapes: B samples per data-parallel rank.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_modules.shared.train_loss import log_train_loss

if TYPE_CHECKING:
    from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]  # images and labels


class Classifier(LightningModule):
    """Train a network that gives each class a score, and log loss and accuracy of evaluation.

    Args:
        network: Maps images to scores, (B, num_classes); the highest is the class predicted.
        num_classes: Number of classes.
        loss: Gives the mean loss of scores and labels, (B,).
        optimizer: Makes the optimizer of the parameters.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; None: no
            scheduler.
        loss_reduction: Training minimizes the mean or the sum over a rank's batch.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum'; got {loss_reduction!r}.")
        self.network, self.loss, self.loss_reduction = network, loss, loss_reduction
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        # micro: torchmetrics' default is the mean over classes
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Score the classes: (B, C, H, W) -> (B, num_classes)."""
        return self.network(x)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = self.loss(self(images), labels)
        log_train_loss(self, loss, len(labels))
        return loss * len(labels) if self.loss_reduction == "sum" else loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_accuracy)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate("test", batch, self.test_accuracy)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def _evaluate(self, stage: str, batch: Batch, accuracy: MulticlassAccuracy) -> Tensor:
        """Log loss and accuracy, and return the predicted classes, (B,)."""
        images, labels = batch
        scores = self(images)
        loss = self.loss(scores, labels)
        predicted = scores.argmax(dim=1)
        accuracy.update(predicted, labels)
        size = len(labels)
        self.log(
            f"{stage}/loss", loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=size
        )
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=size)
        return predicted
