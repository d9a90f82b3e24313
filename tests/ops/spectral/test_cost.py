"""Which method the cost rule takes, and the bytes that it sends."""

import pytest
import torch

import lightning_shard
from lightning_shard import spectral_method
from lightning_shard.ops.spectral.cost import Extent, plan
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import mesh_of

OTHERS = 32


def steps(*extents: Extent, real: bool = True, device: str = "cpu") -> tuple[tuple[int, bool], ...]:
    return plan(extents, OTHERS, 4, real, device)


def test_truncated_dims_take_products():
    assert steps(Extent(1024, 1024, 32, 4), Extent(1024, 1024, 17, 1)) == ((1, False), (0, False))


def test_whole_spectra_take_ffts():
    chosen = steps(Extent(1024, 1024, 1024, 4), Extent(1024, 1024, 513, 1))
    assert chosen == ((1, True), (0, True))


def test_the_truncated_dim_goes_first():
    rows, columns = Extent(1024, 1024, 16, 1), Extent(1024, 1024, 513, 4)
    assert steps(rows, columns) == ((0, False), (1, True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_table_that_is_not_kept_is_not_made(device):
    """17 frequencies of 2^20 points are a table of 136 MiB, made for each direction."""
    assert steps(Extent(2**20, 2**20, 17, 1), device=device) == ((0, True),)
    assert steps(Extent(2**12, 2**12, 17, 1), device=device) == ((0, False),)


def test_methods_can_be_forced():
    extents = (Extent(64, 64, 64, 2), Extent(64, 64, 5, 1))
    with spectral_method("dft"):
        assert {fft for _, fft in steps(*extents)} == {False}
    with spectral_method("fft"):
        assert {fft for _, fft in steps(*extents)} == {True}
    with pytest.raises(ValueError, match="got 'fast'"), spectral_method("fast"):  # pyright: ignore[reportArgumentType]
        pass


@pytest.mark.spmd(4)
def test_bytes_do_not_depend_on_the_resolution():
    """Modes are reduce-scattered once and gathered once, forward and backward.

    One byte to each rank asks whether something sees the tensor that takes the modes.
    """
    modes, channels, ranks = (8, 5), 3, 4
    for extent in (64, 96):
        x = torch.randn(1, channels, extent, extent, requires_grad=True)
        split = lightning_shard.shard(x, mesh_of(4), 2)
        with counted() as traffic, spectral_method("dft"):
            spectrum = torch.fft.rfft2(split)
            kept = spectrum[:, :, : modes[0], : modes[1]] * 2
            out = torch.zeros(1, channels, extent, extent // 2 + 1, dtype=torch.complex64)
            out[:, :, : modes[0], : modes[1]] = kept
            torch.fft.irfft2(out, s=(extent, extent)).to_local().sum().backward()
        sent = 4 * (ranks - 1) * 8 * channels * modes[0] * modes[1] // ranks
        assert traffic.bytes == sent + (ranks - 1)


@pytest.mark.spmd(2)
def test_a_whole_spectrum_is_transposed_after_the_local_transform():
    x = torch.randn(1, 4, 32, 32)
    split = lightning_shard.shard(x, mesh_of(2), 2)
    with counted() as traffic, spectral_method("fft"):
        torch.fft.rfft2(split).to_local()
    half_spectrum = 4 * 16 * 17 * 8  # of this rank's rows
    assert traffic.bytes == 2 * half_spectrum // 2
