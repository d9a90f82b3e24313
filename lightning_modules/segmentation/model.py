"""MONAI's DynUNet as an ordinary LightningModule that segments whole volumes.

It sees whole volumes and only torch functions, so a strategy may hand it volumes that are split
over ranks. So there are no patches in training and no sliding window in inference.

Shapes: B volumes, C classes, X x Y x Z voxels.

Source: Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image
segmentation", Nature Methods 18 (2021), https://arxiv.org/abs/1809.10486; network and loss are
MONAI's, https://github.com/Project-MONAI/MONAI.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_modules.segmentation.dice import DicePerClass
from lightning_modules.segmentation.phantoms import CLASSES
from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.optional import optional
from lightning_modules.shared.train_loss import log_train_loss

Batch = dict[str, Tensor]
Strides = Sequence[int | tuple[int, int, int]]


# Not a lambda: jsonargparse would turn it into init_args, which survive a change of class in YAML.
def nesterov(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make nnU-Net's optimizer: SGD with lr 1e-2, Nesterov's momentum 0.99, decay 3e-5."""
    return SGD(parameters, lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)


class VolumeSegmentation(LightningModule):
    """Train a U-Net on the Dice and the cross-entropy of whole volumes, with deep supervision.

    A batch is `{"image": (B, channels, X, Y, Z), "label": (B, 1, X, Y, Z)}`; the label may be
    missing in prediction. Each channel of a volume is normalised to mean 0 and variance 1. Extents
    that the network's strides do not divide are padded with zeros, and the prediction is cropped.

    Evaluation logs `val/loss`, `test/loss`, the Dice of each class but the first, such as
    `test/dice_lesion`, and their mean, `test/dice`. A class that no volume has is left out.

    Args:
        classes: Names of the classes, by their numbers in the labels; the first is the background.
        channels: Channels of the images.
        filters: Channels of the network at each level.
        strides: By what each level is coarser than the one before, along all dims or each; the
            first is 1. There are as many as filters, three or more.
        deep_supervision: The number of coarser levels that are supervised, too; each weighs half as
            much as the one before.
        res_block: True makes the blocks residual.
        optimizer: Makes the optimizer of the parameters; by default that of nnU-Net. Not stored in
            checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; none by default.
            Not stored in checkpoints.

    Raises:
        ValueError: The levels do not fit together.
    """

    def __init__(
        self,
        classes: Sequence[str] = CLASSES,
        channels: int = 1,
        filters: Sequence[int] = (32, 64, 128, 256, 320, 320),
        strides: Strides = (1, 2, 2, 2, 2, 2),
        deep_supervision: int = 2,
        res_block: bool = False,
        optimizer: OptimizerCallable = nesterov,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        at_least(1, channels=channels, filters=filters)
        self.multiple = _checked(classes, filters, strides, deep_supervision)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.classes = tuple(classes)
        weights = [0.5**level for level in range(1 + deep_supervision)]
        self.weights = [weight / sum(weights) for weight in weights]
        self.network_options: dict[str, Any] = {
            "spatial_dims": 3,
            "in_channels": channels,
            "out_channels": len(self.classes),
            "kernel_size": [3] * len(filters),
            "strides": list(strides),
            "upsample_kernel_size": list(strides[1:]),
            "filters": list(filters),
            "deep_supervision": deep_supervision > 0,
            "deep_supr_num": max(deep_supervision, 1),
            "res_block": res_block,
        }
        losses = optional("monai.losses", type(self).__name__, "segmentation")
        # not over the batch: its Dice would depend on how many ranks share it
        self.loss = losses.DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.val_dice, self.test_dice = (DicePerClass(len(self.classes)) for _ in range(2))
        self.network: Any = None

    @override
    def configure_model(self) -> None:
        if self.network is None:
            nets = optional("monai.networks.nets", type(self).__name__, "segmentation")
            self.network = nets.DynUNet(**self.network_options)

    @override
    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes: (B, channels, X, Y, Z) -> (B, C, X, Y, Z).

        In training with deep supervision: (B, levels, C, X, Y, Z), the finest level first.
        """
        x, y, z = extents = image.shape[2:]
        padded = [size for n in reversed(self._padding(extents)) for size in (0, n)]
        logits = self.network(F.pad(F.instance_norm(image), padded))
        return logits[..., :x, :y, :z]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        image, label = batch["image"], self._label(batch)
        logits = self(image)
        levels = logits.unbind(1) if len(self.weights) > 1 else [logits]
        losses = [
            w * self.loss(level, label) for w, level in zip(self.weights, levels, strict=True)
        ]
        loss = torch.stack(losses).sum()
        log_train_loss(self, loss, len(image))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch, self.val_dice)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> Batch:
        predicted = self._evaluate("test", batch, self.test_dice)
        return {"image": batch["image"], "label": batch["label"], "predicted": predicted}

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_dice("val", self.val_dice)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_dice("test", self.test_dice)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the class of each voxel, (B, X, Y, Z) uint8."""
        return self(batch["image"]).argmax(1).to(torch.uint8)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def _padding(self, extents: Sequence[int]) -> list[int]:
        """Return the number of voxels that are added at the end of each dim."""
        padding = [-n % m for n, m in zip(extents, self.multiple, strict=True)]
        if all(n <= m for n, m in zip(extents, self.multiple, strict=True)):
            padding[-1] += self.multiple[-1]  # the coarsest level has no variance in one voxel
        return padding

    def _label(self, batch: Batch) -> Tensor:
        """The label of a batch, whose classes are known.

        Raises:
            ValueError: A class has no name.
        """
        if "label" not in batch:
            raise ValueError(
                "the batch has no label; training, validation and test need one, predict does not."
            )
        label, known = batch["label"], len(self.classes)
        if not 0 <= int(label.min()) <= int(label.max()) < known:
            raise ValueError(
                f"labels must be from 0 to {known - 1}, for the {known} classes "
                f"{', '.join(self.classes)}; got {int(label.min())} to {int(label.max())}. Name "
                "all classes, or change the labels."
            )
        return label

    def _evaluate(self, stage: str, batch: Batch, dice: DicePerClass) -> Tensor:
        """Log the loss, and return the predicted classes, (B, X, Y, Z)."""
        image, label = batch["image"], self._label(batch)
        logits = self(image)
        loss = self.loss(logits, label)
        predicted = logits.argmax(1)
        dice.update(predicted, label.squeeze(1))
        self.log(f"{stage}/loss", loss, on_epoch=True, sync_dist=True, batch_size=len(image))
        return predicted

    def _log_dice(self, stage: str, dice: DicePerClass) -> None:
        values = dice.compute()[1:]
        dice.reset()
        for name, value in zip(self.classes[1:], values, strict=True):
            if not value.isnan():
                self.log(f"{stage}/dice_{name}", value, sync_dist=True)
        self.log(f"{stage}/dice", values.nanmean(), prog_bar=True, sync_dist=True)


def _checked(
    classes: Sequence[str], filters: Sequence[int], strides: Strides, deep_supervision: int
) -> list[int]:
    """By what the extents must be divisible.

    Raises:
        ValueError: The levels do not fit together.
    """
    levels = len(filters)
    if len(classes) < 2:
        raise ValueError(
            f"classes must name the background and one class or more; got {[*classes]}."
        )
    if levels < 3 or len(strides) != levels or strides[0] not in (1, (1, 1, 1)):
        raise ValueError(
            f"filters and strides must be for the same levels, three or more, and the first stride "
            f"must be 1; got filters {[*filters]} and strides {[*strides]}."
        )
    if not 0 <= deep_supervision <= levels - 2:
        raise ValueError(
            f"deep_supervision must be from 0 to {levels - 2}, since the network has {levels} "
            f"levels; got {deep_supervision}."
        )
    each = [(s, s, s) if isinstance(s, int) else s for s in strides]
    return [prod(along) for along in zip(*each, strict=True)]
