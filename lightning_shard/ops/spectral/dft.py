"""Transforms one dim to those of its frequencies that are kept, and computes the adjoint.

A dim of N rows of which k frequencies are kept is one (k, N) matrix; a rank applies its columns to
its rows. Phases are exact integers (f n) mod N, turned into float64 angles, and cast last. Products
run in full float32 (or float64) whatever autocast and the TF32 switch say: truncated inputs would
cost three digits. Real data takes one real product with cosines and sines.

Where all rows are at hand and many frequencies are kept, an FFT is cheaper. Its adjoint is an FFT
too: put the modes in their places, transform back. So backward keeps nothing of the size of the
field.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.cache import made_once
from lightning_shard.domain.memory_format import owned
from lightning_shard.processes.torch_private.typed import fft

Frequencies = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """x -> sum over rows n of x_n exp(-2 pi i f n / N), for each kept frequency f in [0, N).

    Attributes:
        extent: N, the number of points; rows beyond it are ignored, missing ones are zero.
        rows: The global rows `[low, high)` that are at hand.
        kept: The frequencies, in the order of the result.
        fft: True for an FFT instead of a product; the rows must begin at 0.
    """

    extent: int
    rows: tuple[int, int]
    kept: Frequencies
    fft: bool = False

    def half(self) -> bool:
        """True if the one-sided FFT of real data has all kept frequencies."""
        return max(self.kept, default=0) <= self.extent // 2


def analyse(x: Tensor, dim: int, transform: Transform) -> Tensor:
    """(..., n, ...) real or complex -> (..., k, ...) complex."""
    return _Analysis.apply(x, dim, transform, not x.is_complex())


def synthesise(modes: Tensor, dim: int, transform: Transform, *, real: bool) -> Tensor:
    """Apply the adjoint, sum over f of modes_f exp(+2 pi i f n / N), or its real part.

    (..., k, ...) complex -> (..., n, ...) complex or real.
    """
    return _Synthesis.apply(modes, dim, transform, real)


def scale(norm: str | None, extents: Sequence[int], *, forward: bool) -> float:
    """torch.fft's normalization: on the forward transform, the backward one, or half on each."""
    count = math.prod(extents)
    if norm == "ortho":
        return count**-0.5
    return 1 / count if (norm == "forward") == forward else 1.0


class _Analysis(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, transform: Transform, real: bool) -> Tensor:
        ctx.plan = dim, transform, real
        with torch.autocast(x.device.type, enabled=False), _FullPrecision(x.device):
            return owned((_fft if transform.fft else _product)(x, dim, transform), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Synthesis.apply(grads[0], *ctx.plan), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Analysis.apply(tangents[0], *ctx.plan)


class _Synthesis(Function):
    @staticmethod
    def forward(ctx: Any, modes: Tensor, dim: int, transform: Transform, real: bool) -> Tensor:
        ctx.plan = dim, transform, real
        with torch.autocast(modes.device.type, enabled=False), _FullPrecision(modes.device):
            inverse = _inverse_fft if transform.fft else _adjoint
            return owned(inverse(modes, dim, transform, real), modes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Analysis.apply(grads[0], *ctx.plan), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Synthesis.apply(tangents[0], *ctx.plan)


def _product(x: Tensor, dim: int, t: Transform) -> Tensor:
    matrix = table(t.extent, t.kept, t.rows, x.dtype.to_complex(), x.device)
    if x.is_complex():
        return _apply(matrix, x, dim)
    if dim == x.ndim - 1:
        pairs = torch.matmul(x, _interleaved(matrix).t())
        return torch.view_as_complex(torch.unflatten(pairs, -1, (len(t.kept), 2)))
    real, imag = _apply(torch.cat([matrix.real, matrix.imag]), x, dim).chunk(2, dim)
    return torch.complex(real, imag)


def _adjoint(modes: Tensor, dim: int, t: Transform, real: bool) -> Tensor:
    matrix = table(t.extent, t.kept, t.rows, modes.dtype, modes.device)
    if not real:
        return _apply(matrix.mH, modes, dim)
    if dim == modes.ndim - 1:
        pairs = torch.view_as_real(modes.resolve_conj().contiguous()).flatten(-2)
        return torch.matmul(pairs, _interleaved(matrix))
    stacked = torch.cat([modes.real, modes.imag], dim)
    return _apply(torch.cat([matrix.real, matrix.imag]).t(), stacked, dim)


def _apply(matrix: Tensor, x: Tensor, dim: int) -> Tensor:
    if dim == x.ndim - 1:
        return torch.matmul(x, matrix.t())
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    slabs = x.reshape(math.prod(before), x.shape[dim], math.prod(after))
    return torch.matmul(matrix, slabs).view(*before, matrix.shape[0], *after)


def _interleaved(matrix: Tensor) -> Tensor:
    """(k, n) complex -> (2 k, n) real: the real part of each row, then its imaginary part."""
    return torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)


@made_once
def table(
    extent: int, kept: Frequencies, rows: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """exp(-2 pi i f n / N) of shape (kept, rows); zero for rows beyond N."""
    f = torch.tensor(kept, dtype=torch.int64, device=device)[:, None]
    n = torch.arange(*rows, dtype=torch.int64, device=device)
    angle = (f * n % extent).double() * (-2 * math.pi / extent)
    return torch.polar((n < extent).double().expand_as(angle), angle).to(dtype)


def _fft(x: Tensor, dim: int, t: Transform) -> Tensor:
    transform = fft.fft if x.is_complex() or not t.half() else fft.rfft
    modes = transform(x, t.extent, dim)
    runs = _runs(t.kept)
    if runs == ((0, modes.shape[dim]),):
        return modes
    return torch.cat([modes.narrow(dim, *run) for run in runs], dim)


def _inverse_fft(modes: Tensor, dim: int, t: Transform, real: bool) -> Tensor:
    half = real and t.half()
    shape = list(modes.shape)
    shape[dim] = t.extent // 2 + 1 if half else t.extent
    placed = modes.new_zeros(shape)
    start = 0
    for place, size in _runs(t.kept):
        placed.narrow(dim, place, size).copy_(modes.narrow(dim, start, size))
        start += size
    if half:  # the inverse counts each of these twice, for its negative
        placed.narrow(dim, 1, (t.extent - 1) // 2).mul_(0.5)
        _make_real(placed, dim, t)
        x = fft.irfft(placed, t.extent, dim, norm="forward")
    else:
        x = fft.ifft(placed, dim=dim, norm="forward")
        x = x.real.clone() if real else x
    missing = t.rows[1] - t.extent
    if missing > 0:
        shape[dim] = missing
        return torch.cat([x, x.new_zeros(shape)], dim)
    return x.narrow(dim, 0, t.rows[1]).clone() if missing else x


def _make_real(placed: Tensor, dim: int, t: Transform) -> None:
    """Leave out the imaginary parts of frequencies 0 and N/2, in place.

    Of real data they are zero. A CPU does not read them; cuFFT does for some extents, such as 2^13
    and 2^14 (https://github.com/pytorch/pytorch/issues/154496).
    """
    for place in (0, t.extent // 2):
        if 2 * place % t.extent == 0 and place in t.kept:
            own = placed.narrow(dim, place, 1)
            torch.view_as_real(own).select(-1, 1).zero_()


@lru_cache(maxsize=512)
def _runs(kept: Frequencies) -> tuple[tuple[int, int], ...]:
    """`kept` as runs `(first, length)` of consecutive frequencies."""
    runs: list[tuple[int, int]] = []
    for f in kept:
        if runs and f == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((f, 1))
    return tuple(runs)


class _FullPrecision:
    """No TF32 while open; on CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self.active = device.type != "cpu"

    def __enter__(self) -> None:
        if self.active:
            self.before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        if self.active:
            torch.set_float32_matmul_precision(self.before)
