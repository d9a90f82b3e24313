"""Fourier layers as others write them, options of neuraloperator's, and reduced precision."""

import copy

import pytest
import torch
from neuralop.layers.spectral_convolution import SpectralConv
from neuralop.models import FNO
from torch import nn

import lightning_shard
from lightning_shard import spectral_method
from tests.double_fno import double_spectral_conv, to_double
from tests.parity import assert_parity_of_module, mesh_of

MODES = 3


class RealPairs(nn.Module):
    """PhysicsNeMo's (Modulus') layer: weights are real pairs; corners of the last dims."""

    def __init__(self, dims):
        super().__init__()
        torch.manual_seed(3)
        self.dims, corners = dims, 2 ** (dims - 1)
        self.weights = nn.ParameterList(
            torch.rand(2, 4, *[MODES] * dims, 2, dtype=torch.double) for _ in range(corners)
        )

    def forward(self, x):
        spatial = list(range(-self.dims, 0))
        spectrum = torch.fft.rfftn(x, dim=spatial)
        size = [x.size(0), 4, *x.shape[2:-1], x.size(-1) // 2 + 1]
        out = torch.zeros(size, dtype=torch.cdouble, device=x.device)
        letters = "xyz"[: self.dims]
        for corner, weights in enumerate(self.weights):
            halves = [
                slice(-MODES, None) if corner >> d & 1 else slice(MODES)
                for d in range(self.dims - 1)
            ]
            place = (slice(None), slice(None), *halves, slice(MODES))
            out[place] = torch.einsum(
                f"bi{letters},io{letters}->bo{letters}",
                spectrum[place],
                torch.view_as_complex(weights),
            )
        return torch.fft.irfftn(out, s=x.shape[2:], dim=spatial)


class Viewed(RealPairs):
    """Holds a view of the spectrum that it writes, which then lies whole on every rank."""

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros(x.size(0), 4, x.size(2), x.size(3) // 2 + 1, dtype=torch.cdouble)
        seen = out.flatten(0, 1)
        for rows, weights in zip((slice(MODES), slice(-MODES, None)), self.weights, strict=True):
            out[:, :, rows, :MODES] = torch.einsum(
                "bixy,ioxy->boxy", spectrum[:, :, rows, :MODES], torch.view_as_complex(weights)
            )
        return torch.fft.irfft2(out + seen.view(out.shape), s=x.shape[2:])


class Shifted(nn.Module):
    """The centre of a shifted two-sided spectrum, without a tensor of zeros around it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.rand(2, 4, 4, 4, dtype=torch.cdouble))

    def forward(self, x):
        spectrum = torch.fft.fftshift(torch.fft.fft2(x, norm="ortho"), dim=(-2, -1))
        rows, columns = (n // 2 for n in x.shape[-2:])
        place = (..., slice(rows - 2, rows + 2), slice(columns - 2, columns + 2))
        out = torch.zeros(x.size(0), 4, *x.shape[-2:], dtype=torch.cdouble)
        out[place] = torch.einsum("bixy,ioxy->boxy", spectrum[place], self.weight)
        out = torch.fft.ifftshift(out, dim=(-2, -1))
        return torch.fft.ifft2(out, norm="ortho").real


def double_conv(**options):
    torch.manual_seed(3)
    layer = double_spectral_conv()(2, 2, **options)
    return to_double(layer)


LAYERS = {
    "pairs_2d": (lambda: RealPairs(2), (13, 10)),
    "pairs_3d": (lambda: RealPairs(3), (9, 8, 7)),
    "shifted": (Shifted, (13, 10)),
    "viewed": (lambda: Viewed(2), (13, 10)),
    "max_n_modes": (lambda: double_conv(n_modes=(4, 4), max_n_modes=(8, 8)), (13, 12)),
    "scaled_up": (lambda: double_conv(n_modes=(4, 4), resolution_scaling_factor=2), (9, 8)),
    "scaled_down": (lambda: double_conv(n_modes=(4, 4), resolution_scaling_factor=0.5), (14, 12)),
    "separable": (lambda: double_conv(n_modes=(4, 4), separable=True), (13, 10)),
    "one_dim": (lambda: double_conv(n_modes=(6,)), (45,)),
}


@pytest.mark.quick_rows("one_dim")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, extents = LAYERS[name]
    layouts = {(2,): mesh_of(4)}
    if len(extents) > 1:
        layouts |= {(3,): mesh_of(4), (2, 3): mesh_of(2, 2)}
    for dims, mesh in layouts.items():
        for method in ("dft", "fft"):
            with spectral_method(method):
                assert_parity_of_module(make(), (2, 2, *extents), dims, mesh)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("extents", [(45, 21), (64, 48)], ids=str)
def test_an_operator_at_another_resolution(extents):
    """Zero-shot super-resolution: coordinates and frequencies are those of the whole field."""
    torch.manual_seed(3)
    net = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2,
              domain_padding=0.1)  # fmt: skip
    assert_parity_of_module(to_double(net), (1, 1, *extents), [2, 3], mesh_of(2, 2))


def errors(net, x, split, wanted):
    """Relative errors of ours and of one process, against `wanted`."""
    ours = lightning_shard.gather(net(split)).detach().double()
    alone = net(x).detach().double()
    return [((y - wanted).norm() / wanted.norm()).item() for y in (ours, alone)]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("method", ["dft", "fft"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_accurate_as_one_process(dtype, method):
    torch.manual_seed(3)
    net = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    x = torch.randn(2, 1, 32, 24)
    wanted = to_double(copy.deepcopy(net))(x.double()).detach()
    with torch.autocast("cpu", dtype), spectral_method(method):
        ours, alone = errors(net, x, lightning_shard.shard(x, mesh_of(2), 2), wanted)
    assert ours <= 1.1 * alone


@pytest.mark.spmd(2)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("precision", ["half", "mixed"])
def test_half_precision_of_the_layer(precision, samples):
    """neuraloperator's runs on CUDA at powers of two only; ours transforms in float32."""
    torch.manual_seed(3)
    layer = SpectralConv(2, 3, n_modes=(6, 6), fno_block_precision=precision)
    x = torch.randn(samples, 2, 21, 10)
    full = copy.deepcopy(layer)
    full.fno_block_precision = "full"
    wanted = full(x).detach()
    found = lightning_shard.gather(layer(lightning_shard.shard(x, mesh_of(2), 2)))
    assert ((found.float() - wanted).norm() / wanted.norm()).item() < 2e-3
