"""The networks of drawn trainings, and parts of networks that are kept or called in other ways."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Mixed(nn.Module):
    """A part of a network that is not local."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "fft":
                modes = torch.fft.rfft2(x)
                return x + torch.fft.irfft2(
                    torch.einsum("bchw,cd->bdhw", modes, self.weight + 0j), s=x.shape[-2:]
                )
            case "attention":
                rows = x.flatten(2).transpose(1, 2)
                seen = nn.functional.scaled_dot_product_attention(rows @ self.weight, rows, rows)
                return x + seen.transpose(1, 2).reshape(x.shape)
            case "pooled":
                small = nn.functional.max_pool2d(x, 2, ceil_mode=True)
                large = nn.functional.interpolate(small, size=x.shape[-2:], mode="bilinear")
                return torch.cat((x[:, :2], large[:, 2:]), 1) * self.weight.sum()
        return x


class Part(nn.Module):
    """A layer of 4 channels whose parameters or states are of a special kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.layer = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        match kind:
            case "weight_norm":
                parametrizations.weight_norm(self.layer)
            case "spectral_norm":
                parametrizations.spectral_norm(self.layer)
            case "list":
                self.scales = nn.ParameterList([torch.ones(4, 1, 1), torch.zeros(4, 1, 1)])
            case "embedding":
                self.table = nn.Embedding(5, 4)
            case "complex":
                self.phase = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex128))
            case "unused":
                self.unused = nn.Linear(3, 3)
            case "buffers":
                self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
                self.register_buffer("hidden", torch.ones(4, 1, 1), persistent=False)
            case "tied":
                self.again = nn.Conv2d(4, 4, 3, padding=1)
                self.again.weight = self.layer.weight

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        match self.kind:
            case "none":
                return x
            case "list":
                return self.layer(x) * self.scales[0] + self.scales[1]
            case "embedding":
                words = self.table(torch.tensor([1, 3], device=x.device)).sum(0)
                return self.layer(x) + words[:, None, None]
            case "complex":
                turned = torch.fft.fft(x, dim=-1) * self.phase
                return x + torch.fft.ifft(turned, dim=-1).real.to(x.dtype)
            case "buffers":
                if self.training:
                    self.seen.add_(1)
                return self.layer(x) * self.hidden / (1 + self.seen)
            case "tied":
                return self.again(self.layer(x))
            case "checkpointed":
                found = checkpoint(self.layer, x, use_reentrant=False)
                assert isinstance(found, Tensor)
                return found
        return self.layer(x)


def norm_of(kind: str, channels: int) -> nn.Module:
    match kind:
        case "group":
            return nn.GroupNorm(2, channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "instance":
            return nn.InstanceNorm2d(channels, affine=True)
    return nn.Identity()


def network_of(drawn: dict[str, Any]) -> nn.Sequential:
    """The network of a drawn training, in float64."""
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        norm_of(drawn["norm"], 4),
        nn.GELU(),
        nn.Dropout(drawn["dropout"]),
        Mixed(drawn["model"]),
        Part(drawn["part"]),
        nn.Conv2d(4, 1, 3, padding=1),
    )
    return network.double()
