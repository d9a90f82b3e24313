"""The convolutional network of PyTorch's MNIST example, as an ordinary LightningModule.

It sees whole images and only torch functions, so a strategy may hand it tensors whose rows or
columns are split over ranks. Shapes: B samples, 28 x 28 pixels, 10 classes.

Source: https://github.com/pytorch/examples/tree/main/mnist
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_modules.shared.train_loss import log_train_loss

Batch = tuple[Tensor, Tensor]


# Defaults are named functions and not lambdas: jsonargparse turns a lambda into init_args, and
# those (a learning rate of 1.0) would survive a change of class in YAML.
def adadelta(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Adadelta with a learning rate of 1.0."""
    return Adadelta(parameters, lr=1.0)


def step_lr(optimizer: Optimizer) -> LRScheduler:
    """Multiply the learning rate by 0.7 after each epoch."""
    return StepLR(optimizer, step_size=1, gamma=0.7)


class MNISTNet(nn.Module):
    """Two convolutions, a max-pooling and two linear layers.

    Args:
        conv_dropout: Dropout rate after pooling.
        linear_dropout: Dropout rate between the linear layers.
    """

    def __init__(self, conv_dropout: float = 0.25, linear_dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(conv_dropout)
        self.dropout2 = nn.Dropout(linear_dropout)
        self.fc1 = nn.Linear(9216, 128)  # 64 channels of 12 x 12
        self.fc2 = nn.Linear(128, 10)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the classes: (B, 1, 28, 28) -> (B, 10)."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class MNISTModule(LightningModule):
    """Classify digits with `MNISTNet`, trained on the negative log-likelihood.

    Evaluation logs `val/loss`, `val/accuracy`, `test/loss` and `test/accuracy`, where accuracy is
    the fraction of samples classified correctly.

    Args:
        conv_dropout: Dropout rate after pooling.
        linear_dropout: Dropout rate between the linear layers.
        optimizer: Makes the optimizer of the parameters; Adadelta with lr 1.0 by default. Not
            stored in checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; by default the
            learning rate is multiplied by 0.7. Not stored in checkpoints.
    """

    def __init__(
        self,
        conv_dropout: float = 0.25,
        linear_dropout: float = 0.5,
        optimizer: OptimizerCallable = adadelta,
        lr_scheduler: LRSchedulerCallable = step_lr,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.network = MNISTNet(conv_dropout, linear_dropout)
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        # micro: torchmetrics' default is the mean over classes
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the classes: (B, 1, 28, 28) -> (B, 10)."""
        return self.network(x)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.nll_loss(self(images), labels)
        log_train_loss(self, loss, len(labels))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._shared_step("val", batch, self.val_accuracy)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._shared_step("test", batch, self.test_accuracy)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def _shared_step(self, stage: str, batch: Batch, accuracy: MulticlassAccuracy) -> Tensor:
        """Log loss and accuracy; the predicted classes, (B,)."""
        images, labels = batch
        log_probabilities = self(images)
        loss = F.nll_loss(log_probabilities, labels)
        predicted = log_probabilities.argmax(dim=1)
        accuracy.update(predicted, labels)
        size = len(labels)
        self.log(f"{stage}/loss", loss, on_epoch=True, sync_dist=True, batch_size=size)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=size)
        return predicted
