"""Losses and operators of fields as people of scientific computing write them."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import Apply, Case, row

FIELD = (2, 3, 13, 11)


def function(f):
    return lambda: Apply(f)


def spectral_loss(net, x, y):
    p, q = torch.fft.rfft2(net(x)), torch.fft.rfft2(y)
    return (p - q).abs().pow(2).mean() + (p.abs() - q.abs()).abs().mean()


def sobolev_loss(net, x, y):
    e = net(x) - y
    h, w = e.shape[-2:]
    kx = torch.fft.fftfreq(h, d=1 / h, dtype=x.dtype).reshape(-1, 1)
    ky = torch.fft.fftfreq(w, d=1 / w, dtype=x.dtype).reshape(1, -1)
    weight = torch.sqrt(1 + kx**2 + ky**2)
    return torch.norm(torch.fft.fftn(e, dim=(-2, -1)) * weight, dim=(-2, -1)).sum()


def energy_spectrum(x):
    """Radially binned."""
    h, w = x.shape[-2:]
    energy = torch.fft.fft2(x).abs() ** 2
    k = torch.sqrt(
        torch.fft.fftfreq(h, 1 / h)[:, None] ** 2 + torch.fft.fftfreq(w, 1 / w)[None] ** 2
    )
    return torch.stack([(energy * (k.round() == i)).sum((-2, -1)) for i in range(5)], -1)


def energy_spectrum_bincount(x):
    h, w = x.shape[-2:]
    energy = (torch.fft.fft2(x).abs() ** 2).flatten(-2)
    k = torch.sqrt(
        torch.fft.fftfreq(h, 1 / h)[:, None] ** 2 + torch.fft.fftfreq(w, 1 / w)[None] ** 2
    )
    index = k.round().long().flatten()
    out = torch.zeros(*energy.shape[:-1], int(index.max()) + 1, dtype=x.dtype)
    return out.index_add(-1, index, energy)


def structure_functions(x):
    return torch.stack(
        [
            (torch.roll(x, r, -1) - x).pow(2).mean()
            + (torch.roll(x, -r, 2) - x).abs().pow(3).mean()
            + x.diff(dim=2).pow(2).mean()
            for r in (1, 2, 5)
        ]
    )


def divergence_curl(x):
    u, v = x[:, 0], x[:, 1]
    dudx = (torch.roll(u, -1, -1) - torch.roll(u, 1, -1)) / 2
    dvdy = (torch.roll(v, -1, -2) - torch.roll(v, 1, -2)) / 2
    inner = u[:, 1:-1, 2:] - u[:, 1:-1, :-2] + v[:, 2:, 1:-1] - v[:, :-2, 1:-1]
    gy, gx = torch.gradient(u, dim=(1, 2))
    return dudx + dvdy, inner, gy - gx


def central_conv(x):
    kernel = x.new_tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]]).view(1, 1, 3, 3).repeat(3, 1, 1, 1)
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel, groups=3)


def physics_loss(net, x):
    u = net(x)
    (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
    return (g.pow(2).mean() + (u * h).mean()).reshape(())


def pinn(net, x):
    """Points (N, 2): u_t + u u_x = 0."""
    u = net(x)
    du = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
    uxx = torch.autograd.grad(du[:, 1:2], x, torch.ones_like(u), create_graph=True)[0][:, 1:2]
    return ((du[:, 0:1] + u * du[:, 1:2] - 0.01 * uxx) ** 2).mean()


def masked_losses(x, y):
    mask = y > 0
    a = ((x - y) ** 2 * mask).sum() / mask.sum().clamp(min=1)
    b = torch.where(mask, (x - y).abs(), torch.zeros_like(x)).mean()
    c = ((x - y) ** 2)[mask].mean()
    d = F.mse_loss(x.masked_fill(~mask, 0), y.masked_fill(~mask, 0), reduction="none").mean(
        dim=(2, 3)
    )
    return a, b, c, d


def masked_select_loss(x, y):
    return F.mse_loss(torch.masked_select(x, y > 0), torch.masked_select(y, y > 0))


def relative_losses(x, y):
    n = x.shape[0]
    a = torch.norm(x.reshape(n, -1) - y.reshape(n, -1), 2, 1) / torch.norm(y.reshape(n, -1), 2, 1)
    b = torch.linalg.vector_norm(x - y, dim=(1, 2, 3)) / torch.linalg.vector_norm(y)
    c = torch.sqrt(torch.mean((x - y) ** 2)) + torch.quantile(x.detach(), 0.5)
    d = F.cosine_similarity(x.flatten(1), y.flatten(1)).mean() + F.l1_loss(x, y)
    return a, b, c, d


def weighted_by_latitude(x, y):
    lat = torch.linspace(-90, 90, x.shape[2], dtype=x.dtype)
    w = torch.cos(torch.deg2rad(lat))
    w = (w / w.mean()).view(1, 1, -1, 1)
    return (w * (x - y) ** 2).mean(dim=(-2, -1))


class Siren(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(torch.sin(30 * self.a(x)))


def shear(x):
    """Index arithmetic: upwind differences by slices, limiter, cumulative integral, trapezoid."""
    left, right = x[:, :, 1:] - x[:, :, :-1], x[:, :, 1:] - x[:, :, :-1]
    limited = torch.where(
        left[:, :, :-1] * right[:, :, 1:] > 0,
        torch.minimum(left[:, :, :-1].abs(), right[:, :, 1:].abs()),
        torch.zeros(()).to(x),
    )
    return (
        limited, torch.cumsum(x, 2), torch.trapezoid(x, dx=0.1, dim=2),
        torch.cumulative_trapezoid(x, dim=3), torch.trapz(x, dim=3),
    )  # fmt: skip


def total_variation(x):
    h, w = x.size(2), x.size(3)
    a = torch.pow(x[:, :, 1:, :] - x[:, :, : h - 1, :], 2).sum()
    b = torch.abs(x[:, :, :, 1:] - x[:, :, :, : w - 1]).sum()
    return (a / x[:, :, 1:].numel() + b / (h * w)) / x.size(0)


def ssim(x, y):
    window = torch.ones(3, 1, 5, 5, dtype=x.dtype) / 25
    mx, my = F.conv2d(x, window, padding=2, groups=3), F.conv2d(y, window, padding=2, groups=3)
    sxy = F.conv2d(x * y, window, padding=2, groups=3) - mx * my
    return (
        ((2 * mx * my + 0.01) * (2 * sxy + 0.03) / (mx**2 + my**2 + 0.01)).mean(1).mean(1).mean(1)
    )


def gram(x):
    b, c, h, w = x.size()
    f = x.view(b, c, h * w)
    return (
        f.bmm(f.transpose(1, 2)) / (c * h * w),
        torch.cov(x[0].reshape(c, -1)),
        torch.corrcoef(x[0].reshape(c, -1)),
    )


CASES = {
    "spectral_loss": row(nn.Conv2d, 3, 3, 3, padding=1, on=[FIELD, FIELD], run=spectral_loss),
    "sobolev_loss": row(nn.Conv2d, 3, 3, 3, padding=1, on=[FIELD, FIELD], run=sobolev_loss),
    "energy_spectrum": Case(function(energy_spectrum), [FIELD]),
    "energy_spectrum_bincount": Case(function(energy_spectrum_bincount), [FIELD]),
    "structure_functions": Case(function(structure_functions), [FIELD]),
    "divergence_curl": Case(function(divergence_curl), [FIELD]),
    "central_conv": Case(function(central_conv), [FIELD]),
    "physics_loss": Case(lambda: Apply(physics_loss, nn.Sequential(nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1))), [FIELD], (2, 3)),
    "pinn": Case(lambda: Apply(pinn, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8),
        nn.Tanh(), nn.Linear(8, 1))), [(17, 2)], (0,)),
    "masked_losses": Case(function(masked_losses), [FIELD, FIELD]),
    "masked_select_loss": Case(function(masked_select_loss), [FIELD, FIELD]),
    "relative_losses": Case(function(relative_losses), [FIELD, FIELD]),
    "weighted_by_latitude": Case(function(weighted_by_latitude), [FIELD, FIELD]),
    "siren": Case(Siren, [(17, 2)], (0,)),
    "shear": Case(function(shear), [FIELD]),
    "total_variation": Case(function(total_variation), [FIELD]),
    "ssim": Case(function(ssim), [FIELD, FIELD]),
    "gram": Case(function(gram), [FIELD]),
}  # fmt: skip
