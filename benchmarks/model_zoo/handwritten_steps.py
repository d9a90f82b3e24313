"""Networks and schemes that step in time, as people of scientific computing write them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import Case

FIELD = (2, 3, 13, 11)


class ConvLSTM(nn.Module):
    """Over (B, T, C, H, W)."""

    def __init__(self, channels=3, hidden=4):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x):
        b, t, _, h, w = x.size()
        state = torch.zeros(b, self.hidden, h, w, dtype=x.dtype, device=x.device)
        cell = torch.zeros_like(state)
        outputs = []
        for step in range(t):
            i, f, o, g = torch.chunk(self.gates(torch.cat([x[:, step], state], dim=1)), 4, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
            outputs.append(state)
        return torch.stack(outputs, dim=1)


class Rollout(nn.Module):
    """Autoregressive steps, writing into a preallocated result."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        result = torch.empty(x.shape[0], 4, *x.shape[1:], dtype=x.dtype)
        history = []
        for _ in range(4):
            x = x + 0.1 * torch.tanh(self.net(x))
            history.append(x.unsqueeze(1))
        return torch.cat(history, 1), result.shape[1] * x.mean()


class RolloutInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        result = x.new_zeros((x.shape[0], 4, *x.shape[1:]))
        for step in range(4):
            x = x + 0.1 * torch.tanh(self.net(x))
            result[:, step] = x
        return result


class Diffusion(nn.Module):
    """A sampler's schedule: gathered coefficients, a time embedding, scale and shift."""

    def __init__(self):
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.9, 0.1, 10))
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 6))
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        t = torch.arange(x.shape[0]) + 2
        a = self.alphas.gather(-1, t).reshape(-1, 1, 1, 1)
        freqs = torch.exp(-math.log(100) * torch.arange(4, dtype=x.dtype) / 4)
        e = t[:, None] * freqs[None]
        scale, shift = self.time(torch.cat([e.sin(), e.cos()], -1))[:, :, None, None].chunk(2, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * x.flip(0)
        return self.conv(noisy) * (scale + 1) + shift


class Boundary(nn.Module):
    """Boundary values set in place."""

    def forward(self, x):
        u = x.clone()
        u[:, :, 0, :] = 0
        u[:, :, -1, :] = u[:, :, -2, :]
        u[..., 0] = 1.0
        u[..., 1:-1, 1:-1] += 0.1 * (
            x[..., 2:, 1:-1]
            + x[..., :-2, 1:-1]
            + x[..., 1:-1, 2:]
            + x[..., 1:-1, :-2]
            - 4 * x[..., 1:-1, 1:-1]
        )
        return u


class WarpField(nn.Module):
    """Semi-Lagrangian advection by grid_sample."""

    def forward(self, x):
        b, _, h, w = x.shape
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((xs, ys), 0).to(x)[None].expand(b, -1, -1, -1) + x[:, :2]
        grid = torch.stack(
            (2 * grid[:, 0] / max(w - 1, 1) - 1, 2 * grid[:, 1] / max(h - 1, 1) - 1), -1
        )
        return F.grid_sample(x, grid, align_corners=True, padding_mode="border")


CASES = {
    "conv_lstm": Case(ConvLSTM, [(2, 3, 3, 9, 7)], (3, 4)),
    "warp": Case(WarpField, [FIELD]),
    "diffusion": Case(Diffusion, [FIELD]),
    "rollout": Case(Rollout, [FIELD]),
    "rollout_in_place": Case(RolloutInPlace, [FIELD]),
    "boundary": Case(Boundary, [FIELD]),
}
