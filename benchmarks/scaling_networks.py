"""The networks and fields whose steps are predicted on clusters (`benchmarks.scaling`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from neuralop.models import TFNO
from torch import Tensor, nn
from torch.utils.data import DataLoader


class UNet3d(nn.Module):
    """Two convolutions with group norm at each of four resolutions, down and up again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        self.down = nn.ModuleList(map(_double, [1, *widths[:-1]], widths))
        self.up = nn.ModuleList(_double(wide + low, low) for low, wide in pairwise(widths))
        self.head = nn.Conv3d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W, D) -> (B, 1, H, W, D)."""
        kept = []
        for block in self.down:
            x = block(F.max_pool3d(x, 2) if kept else x)
            kept.append(x)
        for block, beside in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return self.head(x)


def _double(given: int, made: int) -> nn.Sequential:
    layers = []
    for channels in (given, made):
        layers += [nn.Conv3d(channels, made, 3, padding=1), nn.GroupNorm(8, made), nn.ReLU()]
    return nn.Sequential(*layers)


class Task(LightningModule):
    """The mean square of a network's output, with Adam."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """(B, 1, *spatial) -> ()."""
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


@dataclass(frozen=True)
class Workload:
    """A network and its field.

    Attributes:
        make: Makes the network.
        extents: Of the field.
        channels: Of the hidden layers.
        spectral_layers: That transform a field of these channels; 0: it has none.
    """

    make: Callable[[], nn.Module]
    extents: tuple[int, ...]
    channels: int
    spectral_layers: int = 0

    def task(self) -> Task:
        torch.manual_seed(0)
        return Task(self.make())

    def data(self, extents: Sequence[int] | None = None) -> DataLoader[Any]:
        """One sample, whose numbers are all the same one in memory."""
        sample: Any = [torch.zeros(()).expand(1, 1, *(extents or self.extents))]
        return DataLoader(sample, batch_size=None)


def _tfno(modes: tuple[int, ...], channels: int) -> Callable[[], nn.Module]:
    return lambda: TFNO(modes, 1, 1, channels, n_layers=4, factorization="tucker", rank=0.1)


WORKLOADS: dict[str, Workload] = {
    "TFNO 2048²": Workload(_tfno((64, 64), 64), (2048, 2048), 64, 4),
    "TFNO 1024³": Workload(_tfno((32, 32, 32), 32), (1024, 1024, 1024), 32, 4),
    "U-Net 512³": Workload(lambda: UNet3d(16), (512, 512, 512), 16),
}
