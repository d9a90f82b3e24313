"""The one-convolution network of PhysicsNeMo's domain-parallel tutorial, and images to train it on.

Ordinary Lightning code: it sees whole images and only torch functions, so a strategy may hand it
tensors whose rows or columns are split over ranks. Global pooling makes the number of parameters
independent of the resolution, and the class of an image is a wavelength in pixels, so the same task
exists at every resolution. Shapes: B samples per data-parallel rank, C channels, H rows, W columns.

Source: "Domain Decomposition, ShardTensor and FSDP Tutorial", NVIDIA PhysicsNeMo documentation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_modules.shared.classifier import Batch, Classifier
from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least


# A named function and not a lambda: jsonargparse turns a lambda into init_args, and those would
# survive a change of class in YAML.
def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make Adam with a learning rate of 3e-2."""
    return Adam(parameters, lr=3e-2)


class SimpleCNN(nn.Module):
    """A convolution, global average pooling and a linear layer.

    Args:
        in_channels: Channels of the images.
        hidden_channels: Channels of the convolution.
        num_classes: Number of classes.
    """

    def __init__(
        self, in_channels: int = 3, hidden_channels: int = 16, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, hidden_channels, kernel_size=3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(hidden_channels, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes: (B, C, H, W) -> (B, num_classes)."""
        x = self.pool(self.relu(self.conv(x)))
        return self.fc(torch.flatten(x, 1))


class SimpleCNNModule(Classifier):
    """Classify images with `SimpleCNN`, trained on the cross-entropy.

    Evaluation logs `val/loss`, `val/accuracy`, `test/loss` and `test/accuracy`, where accuracy is
    the fraction of samples classified correctly.

    Args:
        in_channels: Channels of the images.
        hidden_channels: Channels of the convolution.
        num_classes: Number of classes.
        optimizer: Makes the optimizer of the parameters; Adam with lr 3e-2 by default. Not stored
            in checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; none by default.
            Not stored in checkpoints.
    """

    def __init__(
        self,
        in_channels: int = 3,
        hidden_channels: int = 16,
        num_classes: int = 10,
        optimizer: OptimizerCallable = adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        network = SimpleCNN(in_channels, hidden_channels, num_classes)
        super().__init__(network, num_classes, F.cross_entropy, optimizer, lr_scheduler)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])


@dataclass(frozen=True, kw_only=True)
class SyntheticImages(Dataset[Batch]):
    """Noisy waves of random direction and phase, made when asked for; the class is the wavelength.

    Wavelengths run geometrically from 3 to 24 pixels; sample `i` is of class `i % num_classes`.
    With an amplitude of 0 images are noise alone and labels are drawn at random: there is nothing
    to learn.

    Attributes:
        indices: Samples of this set; the same index and seed give the same image.
        resolution: Rows and columns of the images.
        channels: Channels of the images; they share a direction and differ in phase.
        num_classes: Number of wavelengths.
        noise: Standard deviation of the noise.
        amplitude: Amplitude of the waves.
        seed: Seed of all images.
    """

    indices: range
    resolution: tuple[int, int]
    channels: int
    num_classes: int
    noise: float
    amplitude: float
    seed: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.indices)

    @override
    def __getitem__(self, position: int) -> Batch:
        """Make an image (C, H, W) and its label ()."""
        index = self.indices[position]
        label = index % self.num_classes
        wavelength = torch.logspace(math.log10(3), math.log10(24), self.num_classes)[label]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        angle = math.pi * torch.rand((), generator=generator)
        phases = 2 * math.pi * torch.rand(self.channels, 1, 1, generator=generator)
        height, width = self.resolution
        rows = torch.arange(height)[:, None] * torch.sin(angle)
        columns = torch.arange(width)[None, :] * torch.cos(angle)
        waves = torch.cos(2 * math.pi / wavelength * (rows + columns) + phases)
        noise = torch.randn(waves.shape, generator=generator)
        if self.amplitude == 0:
            label = int(torch.randint(self.num_classes, (), generator=generator))
        return self.amplitude * waves + self.noise * noise, torch.tensor(label)


class SyntheticImagesDataModule(LightningDataModule):
    """Training, validation and test sets of `SyntheticImages`, as batches `(images, labels)`.

    Batches are images (B, C, H, W) float32 and labels (B,) int64. Nothing is stored: memory does
    not grow with the number of samples.

    Args:
        resolution: Rows and columns of the images.
        channels: Channels of the images.
        num_classes: Number of classes.
        noise: Standard deviation of the noise.
        num_train: Number of training samples.
        num_val: Number of validation samples.
        num_test: Number of test samples.
        batch_size: Samples per data-parallel rank and step.
        seed: Seed of all images.
        num_workers: Processes that make images; 0 makes them in the training process.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.
        amplitude: Amplitude of the waves. With 0 images are noise and labels are drawn at random,
            as in PhysicsNeMo's tutorial.
    """

    def __init__(
        self,
        resolution: tuple[int, int] = (64, 128),
        channels: int = 3,
        num_classes: int = 10,
        noise: float = 0.3,
        num_train: int = 1024,
        num_val: int = 128,
        num_test: int = 256,
        batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = True,
        amplitude: float = 1.0,
    ) -> None:
        super().__init__()
        at_least(1, resolution=resolution, channels=channels, num_classes=num_classes)
        at_least(1, num_train=num_train, batch_size=batch_size)
        at_least(0, num_val=num_val, num_test=num_test, num_workers=num_workers)
        self.batch_size = batch_size
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        ends = (0, num_train, num_train + num_val, num_train + num_val + num_test)
        self.splits = {
            name: SyntheticImages(
                indices=range(*ends[i : i + 2]),
                resolution=resolution,
                channels=channels,
                num_classes=num_classes,
                noise=noise,
                amplitude=amplitude,
                seed=seed,
            )
            for i, name in enumerate(("train", "val", "test"))
        }

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader("val")

    @override
    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test")

    @override
    def predict_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader[Batch]:
        return make_loader(self.splits[split], self.batch_size, shuffle=shuffle, **self.loading)
