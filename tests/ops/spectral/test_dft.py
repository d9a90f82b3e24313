"""The transforms along one dim, without any split."""

from unittest import mock

import pytest
import torch

from lightning_shard.ops.spectral import dft
from lightning_shard.ops.spectral.dft import Transform, synthesise


def inverse_that_reads_everything(modes, extent, dim, norm):
    """As cuFFT's for some extents: imaginary parts of frequencies 0 and N/2 change the result."""
    modes = modes.movedim(dim, -1)
    upper = modes[..., 1 : (extent + 1) // 2].conj().flip(-1)
    x = torch.fft.ifft(torch.cat([modes, upper], -1), dim=-1, norm=norm)
    return (x.real + x.imag).movedim(-1, dim)


@pytest.mark.parametrize("extent", [8, 9])
@pytest.mark.parametrize("kept", [(0, 1, 2), (1, 2), (0, 1, 2, 3, 4)])
def test_the_inverse_sees_no_imaginary_parts_that_real_data_has_not(extent, kept):
    torch.manual_seed(0)
    modes = torch.randn(2, len(kept), 3, dtype=torch.complex128, requires_grad=True)
    by_product = synthesise(modes, ((1, Transform(extent, (0, extent), kept)),), real=True)
    with mock.patch.object(dft.fft, "irfft", inverse_that_reads_everything):
        steps = ((1, Transform(extent, (0, extent), kept, fft=True)),)
        by_fft = synthesise(modes, steps, real=True)
    torch.testing.assert_close(by_fft, by_product)
    grads = [torch.autograd.grad(x.square().sum(), modes)[0] for x in (by_fft, by_product)]
    torch.testing.assert_close(*grads)
