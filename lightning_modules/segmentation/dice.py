"""The Dice coefficient of each class: of every volume by itself, then the mean over volumes."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class DicePerClass(Metric):
    """The mean over volumes of 2 |A and B| / (|A| + |B|), for predicted and true voxels of a class.

    A volume in which a class is neither predicted nor true does not count for this class, as in
    nnU-Net. A class that no volume has is NaN.

    Args:
        num_classes: Number of classes.
    """

    full_state_update = False

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        zeros = torch.zeros(num_classes)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("volumes", zeros.clone(), dist_reduce_fx="sum")
        self.total: Tensor
        self.volumes: Tensor

    @override
    def update(self, predicted: Tensor, label: Tensor) -> None:
        """Count the classes (B, X, Y, Z) of some volumes, predicted and true."""
        both, either = counts(predicted, label, self.num_classes)
        # whole numbers until here: a device may have no float64, and float32 cannot count a volume
        self.total += torch.where(either > 0, 2 * both / either.clamp(min=1), 0.0).sum(0)
        self.volumes += (either > 0).sum(0)

    @override
    def compute(self) -> Tensor:
        """Return one number for each class."""
        return self.total / self.volumes


def counts(predicted: Tensor, label: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Voxels of each volume and class, (B, classes) int64.

    Args:
        predicted: Classes (B, X, Y, Z).
        label: The same, true.
        num_classes: Number of classes.

    Returns:
        The voxels that are predicted and true; the sum of predicted and of true voxels.
    """
    found, true = ([x == c for c in range(num_classes)] for x in (predicted, label))
    both = [(a & b).sum((1, 2, 3)) for a, b in zip(found, true, strict=True)]
    either = [a.sum((1, 2, 3)) + b.sum((1, 2, 3)) for a, b in zip(found, true, strict=True)]
    return torch.stack(both, 1), torch.stack(either, 1)
