"""torch.stft and torch.istft of signals that are split along time, beside one process."""

import itertools

import pytest
import torch

from lightning_shard import DomainTensor, gather, shard
from tests.parity import mesh_of

SIZES = [  # of a transform, from one frame to the next, of a window
    (16, 4, 16), (16, 5, 16), (15, 6, 15), (32, None, 20), (12, 12, 12),
]  # fmt: skip


def spectrum_and_signal(x, window, sizes, center, normalized, length):
    n, hop, width = sizes
    same = {"window": window, "center": center, "normalized": normalized}
    spectrum = torch.stft(x, n, hop, width, return_complex=True, **same)
    signal = torch.istft(spectrum * (1 + 0.1j), n, hop, width, length=length, **same)
    weights = torch.arange(signal.shape[-1], dtype=signal.dtype)
    return spectrum, signal, spectrum.real.sin().sum() + (signal * weights).mean()


@pytest.mark.quick_rows("shape1")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("shape", [(37,), (2, 200)])
def test_spectra_and_signals(shape):
    mesh = mesh_of(3)
    torch.manual_seed(0)
    ways = [(True, False, None), (True, True, shape[-1]), (False, False, shape[-1])]
    for sizes, (center, normalized, length) in itertools.product(SIZES, ways):
        if not center and sizes[2] < sizes[0]:  # torch refuses to leave the first samples out
            continue
        window = torch.hann_window(sizes[2], dtype=torch.float64) + 0.1
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        split = shard(x.detach(), mesh, len(shape) - 1).requires_grad_()
        options = window, sizes, center, normalized, length
        *expected, loss = spectrum_and_signal(x, *options)
        *found, split_loss = spectrum_and_signal(split, *options)
        assert all(isinstance(each, DomainTensor) for each in found)
        torch.testing.assert_close([*map(gather, found)], expected, rtol=1e-10, atol=1e-12)
        gradients = [torch.autograd.grad(*of)[0] for of in ((split_loss, split), (loss, x))]
        torch.testing.assert_close(gather(gradients[0]), gradients[1], rtol=1e-10, atol=1e-12)


@pytest.mark.spmd(2)
def test_windows_that_leave_samples_out_are_refused_as_by_torch():
    spectrum = torch.stft(torch.randn(64), 16, window=torch.hann_window(16), return_complex=True)
    split = shard(spectrum, mesh_of(2), 1)
    with pytest.raises(RuntimeError, match="window overlap add min"):
        torch.istft(split, 16, window=torch.hann_window(16), center=False)
