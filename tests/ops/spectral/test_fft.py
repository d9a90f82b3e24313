"""Spectral layers, unmodified: neuraloperator 2.0.0 and the original code of 2020."""

import pytest
import torch
from neuralop.losses import H1Loss, LpLoss
from neuralop.models import FNO
from torch import nn

import lightning_shard
from lightning_shard import spectral_method
from tests.double_fno import double_spectral_conv, to_double
from tests.pairs import choose
from tests.parity import (
    assert_double_backward,
    assert_parity,
    assert_parity_of_module,
    mesh_of,
)


def spectral_conv(**options):
    torch.manual_seed(3)
    layer = double_spectral_conv()(3, 4, **options)
    for p in layer.parameters():
        p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    return layer


LAYERS = {
    "dense": (lambda: spectral_conv(n_modes=(6, 6)), (13, 10)),
    "dense_odd": (lambda: spectral_conv(n_modes=(6, 6)), (21, 15)),
    "tucker": (
        lambda: spectral_conv(
            n_modes=(6, 6), factorization="tucker", rank=0.4, implementation="factorized"
        ),
        (13, 10),
    ),
    "cp": (
        lambda: spectral_conv(
            n_modes=(6, 6), factorization="cp", rank=0.4, implementation="factorized"
        ),
        (13, 10),
    ),
    "tt": (
        lambda: spectral_conv(
            n_modes=(6, 6), factorization="tt", rank=0.4, implementation="factorized"
        ),
        (13, 10),
    ),
    "reconstructed": (
        lambda: spectral_conv(n_modes=(6, 6), factorization="tucker", rank=0.4),
        (13, 10),
    ),
    "fewer_rows": (lambda: spectral_conv(n_modes=(8, 8)), (6, 5)),
    "three_dims": (lambda: spectral_conv(n_modes=(4, 4, 4)), (6, 7, 8)),
}


class Original(nn.Module):
    """The layer of Li et al. (2020), as published: two corners of the spectrum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weights1 = nn.Parameter(torch.rand(3, 4, 4, 4, dtype=torch.cdouble))
        self.weights2 = nn.Parameter(torch.rand(3, 4, 4, 4, dtype=torch.cdouble))

    def forward(self, x):
        ft = torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], 4, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cdouble)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :4, :4], self.weights1)
        out[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", ft[:, :, -4:, :4], self.weights2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


LAYERS["original"] = (Original, (13, 10))


def check_layer(name, dims, mesh):
    make, extents = LAYERS[name]
    layer = make()
    assert_parity_of_module(layer, (2, 3, *extents), dims, mesh)


methods = pytest.mark.parametrize("method", ["dft", "fft"])


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "dim", "method"), choose(LAYERS, [2, 3], ["dft", "fft"], fast=2))
def test_spectral_layer_on_three_ranks(name, dim, method):
    with spectral_method(method):
        check_layer(name, [dim], mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("name", "method"), choose(LAYERS, ["dft", "fft"]))
def test_spectral_layer_on_two_by_two(name, method):
    with spectral_method(method):
        check_layer(name, [2, 3], mesh_of(2, 2))


@pytest.mark.spmd(2)
@methods
@pytest.mark.parametrize("name", ["dense_odd", "original"])
def test_spectral_layer_on_two_ranks(name, method):
    with spectral_method(method):
        check_layer(name, [2], mesh_of(2))


TRANSFORMS = {
    "fft": lambda x: torch.fft.fft(x, dim=2, norm="ortho"),
    "rfft_n": lambda x: torch.fft.rfft(x, 6, dim=2),
    "rfft_padded": lambda x: torch.fft.rfft(x, 11, dim=2),
    "fftn": lambda x: torch.fft.fftn(x),
    "rfft2": lambda x: torch.fft.rfft2(x, norm="forward"),
    "roundtrip": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]),
    "ifft": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real,
    "shift": lambda x: torch.fft.ifftshift(torch.fft.fftshift(x, dim=(2,)) * 2, dim=(2, 3)),
    "shifted_along_all": lambda x: torch.fft.fftshift(torch.fft.fft2(x)),
    "shifted": lambda x: torch.fft.fftshift(torch.fft.fft2(x), dim=(2, 3))[:, :, 1:5, 2:4],
}


METHODS = ("auto", "dft", "fft")


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "dim"), choose(TRANSFORMS, [2, 3]))
def test_transform(name, dim):
    for method in METHODS:
        with spectral_method(method):
            assert_parity(TRANSFORMS[name], [(2, 3, 7, 5)], {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "extents"), choose(TRANSFORMS, [(3, 2), (45, 8), (1, 6)], every=2), ids=str
)
def test_transform_split_twice_and_with_empty_parts(name, extents):
    """3 rows on 4 ranks; 2 x 2; the FFT splits what is not transformed, here of 2 elements."""
    for method in METHODS:
        with spectral_method(method):
            assert_parity(TRANSFORMS[name], [(1, 2, *extents)], {0: [2]}, mesh_of(4))
            assert_parity(TRANSFORMS[name], [(1, 2, *extents)], {0: [3, 2]}, mesh_of(2, 2))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_that_are_left_out_may_be_nan(dim):
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    x[:, 4:] = x[:, :, 5:] = torch.nan
    split = lightning_shard.shard(x, mesh_of(2), dim).requires_grad_()
    found = torch.fft.rfft2(split, (4, 5))
    expected = torch.fft.rfft2(x[:, :4, :5])
    torch.testing.assert_close(lightning_shard.gather(found), expected)
    (gradient,) = torch.autograd.grad(found.abs().square().sum(), split)
    assert lightning_shard.gather(gradient).isfinite().all()


@pytest.mark.spmd(3)
@methods
@pytest.mark.parametrize("name", ["rfft2", "roundtrip", "shifted", "rfft_padded"])
def test_transform_twice_differentiable(name, method):
    def power(x):
        z = TRANSFORMS[name](x)
        return (torch.view_as_real(z) if z.is_complex() else z).pow(3)

    with spectral_method(method):
        assert_double_backward(power, [(2, 2, 7, 5)], {0: [2]}, mesh_of(3))


def fno(factorization):
    torch.manual_seed(3)
    net = FNO(
        n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2, rank=0.5,
        factorization=factorization, implementation="factorized",
    )  # fmt: skip
    return to_double(net)


class WithLoss(nn.Module):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x, y):
        return self.loss(self.net(x), y)


LOSSES = {
    "l2": LpLoss(d=2, reduction="mean"),
    "l1": LpLoss(d=2, p=1),
    "h1": H1Loss(d=2, reduction="mean"),
    "h1_walls": H1Loss(d=2, periodic_in_x=False, periodic_in_y=False),
}


@pytest.mark.quick_rows("l2-dims1", "l1-dims0", "l1-dims1")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[2, 3], [3, 2]])
@pytest.mark.parametrize("loss", LOSSES)
def test_whole_tfno_with_loss(loss, dims):
    assert_parity_of_module(
        WithLoss(fno("tucker"), LOSSES[loss]), [(2, 1, 13, 10)] * 2, dims, mesh_of(2, 2)
    )
