"""The convolutional network of PyTorch's MNIST example, as an ordinary LightningModule.

It sees whole images and only torch functions, so a strategy may hand it tensors whose rows or
columns are split over ranks. Shapes: B samples, 28 x 28 pixels, 10 classes.

Source: https://github.com/pytorch/examples/tree/main/mnist
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from typing_extensions import override

from lightning_modules.shared.classifier import Classifier


# Defaults are named functions and not lambdas: jsonargparse turns a lambda into init_args, and
# those (a learning rate of 1.0) would survive a change of class in YAML.
def adadelta(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make Adadelta with a learning rate of 1.0."""
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
        """Return log-probabilities of the classes: (B, 1, 28, 28) -> (B, 10)."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class MNISTModule(Classifier):
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
        loss_reduction: Training minimizes the mean over the batch of a rank, or the sum over it, as
            PyTorch's tutorial of FSDP does. Gradients are averaged over ranks either way, so those
            of a sum are batch_size times those of the mean. The mean is logged.
    """

    def __init__(
        self,
        conv_dropout: float = 0.25,
        linear_dropout: float = 0.5,
        optimizer: OptimizerCallable = adadelta,
        lr_scheduler: LRSchedulerCallable = step_lr,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        network = MNISTNet(conv_dropout, linear_dropout)
        super().__init__(network, 10, F.nll_loss, optimizer, lr_scheduler, loss_reduction)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
