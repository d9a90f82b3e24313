"""Networks that several benchmarks step through, of torch and neuraloperator alone."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from neuralop.models import TFNO
from torch import Tensor, nn

from lightning_modules.cnn.simple_cnn import SimpleCNN


class UNet(nn.Module):
    """Two convolutions with group norm at each of four resolutions, down and up again.

    Args:
        channels: Of the finest resolution.
        given: Channels of the field.
        conv: `nn.Conv2d`, or `nn.Conv3d` for volumes.
    """

    def __init__(
        self, channels: int, given: int = 3, conv: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d
    ) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        double = partial(_double, conv)
        self.down = nn.ModuleList(map(double, [given, *widths[:-1]], widths))
        self.up = nn.ModuleList(double(wide + low, low) for low, wide in pairwise(widths))
        self.head = conv(channels, 1, 1)
        self.pool = F.max_pool2d if conv is nn.Conv2d else F.max_pool3d

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, *spatial) -> (B, 1, *spatial)."""
        kept = []
        for block in self.down:
            x = block(self.pool(x, 2) if kept else x)
            kept.append(x)
        for block, beside in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return self.head(x)


def _double(conv: type[nn.Conv2d | nn.Conv3d], given: int, made: int) -> nn.Sequential:
    layers = []
    for channels in (given, made):
        layers += [conv(channels, made, 3, padding=1), nn.GroupNorm(8, made), nn.ReLU()]
    return nn.Sequential(*layers)


class ViT(nn.Module):
    """Patches of 8x8, encoder layers with attention over all patches, a value for each patch."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.layers = nn.ModuleList(_Attention(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, patches, 1)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, nn.Linear(width, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self._by_head(of(y)) for of in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class ResNet50(nn.Module):
    """Stages of 3, 4, 6 and 3 bottlenecks with batch norm (https://arxiv.org/abs/1512.03385)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(_Bottleneck(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 10)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_normed(channels, width, 1), nn.ReLU(),
            *_normed(width, width, 3, stride), nn.ReLU(),
            *_normed(width, 4 * width, 1),
        )  # fmt: skip
        same = stride == 1 and channels == 4 * width
        short = [] if same else _normed(channels, 4 * width, 1, stride)
        self.short = nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def _normed(given: int, made: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(given, made, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(made)]


class Task(LightningModule):
    """The mean square of a network's output.

    Args:
        network: The network.
        optimizer: The class of the optimizer, whose learning rate is 1e-3.
    """

    def __init__(self, network: nn.Module, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """(B, channels, *spatial) -> ()."""
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make it."""
        return self.optimizer(self.parameters(), lr=1e-3)


def _tfno() -> nn.Module:
    return TFNO((16, 16), 3, 1, hidden_channels=16, n_layers=2, rank=0.1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tutorial CNN": SimpleCNN,
    "U-Net": lambda: UNet(16),
    "ResNet50": ResNet50,
    "ViT": ViT,
    "TFNO": _tfno,
}
IN_FLOAT32 = ("TFNO",)  # neuraloperator computes in complex64, whatever its weights are
