"""The networks and fields whose steps are predicted on clusters (`benchmarks.scaling`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from neuralop.models import TFNO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.unet_step import UNet

UNet3d = partial(UNet, given=1, conv=nn.Conv3d)


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
