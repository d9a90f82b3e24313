"""Transforms dims to those of their frequencies that are kept, and computes the adjoint.

A dim of N rows of which k frequencies are kept is one (k, N) matrix; a rank applies its columns to
its rows. Phases are exact integers (f n) mod N, turned into float64 angles, and cast last. Products
run in full float32 (or float64) whatever autocast and the TF32 switch say: truncated inputs would
cost three digits. Real data takes one real product with cosines and sines.

Where all rows are at hand and many frequencies are kept, an FFT is cheaper. Its adjoint is an FFT
too: put the modes in their places, transform back. So backward keeps nothing of the size of the
field.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.cache import made_once
from lightning_shard.processes.torch_private.internals import is_autocast
from lightning_shard.processes.torch_private.typed import fft

Frequencies = Sequence[int]  # a range or a tuple, since they are hashed


@dataclass(frozen=True)
class Transform:
    """x -> w_f times the sum over rows n of x_n exp(-2 pi i f n / N), for each kept frequency f.

    Attributes:
        extent: N, the number of points; rows beyond it are ignored, missing ones are zero.
        rows: The global rows `[low, high)` that are at hand.
        kept: The frequencies in [0, N), in the order of the result.
        fft: True for an FFT instead of a product; the rows must begin at 0.
        factor: The weight w_f of a frequency.
        one_sided: True if the frequencies stand for their negatives, too: the weights of all but 0
            and N/2 are then twice as large.
    """

    extent: int
    rows: tuple[int, int]
    kept: Frequencies
    fft: bool = False
    factor: float = 1.0
    one_sided: bool = False

    def half(self) -> bool:
        """True if the one-sided FFT of real data has all kept frequencies."""
        return highest(self.kept) <= self.extent // 2

    def is_own_negative(self, frequency: int) -> bool:
        """True of 0 and N/2."""
        return 2 * frequency % self.extent == 0

    def weights(self, *, halved: bool = False) -> list[float]:
        """Weigh each kept frequency; `halved` but for those that are their own negative."""
        twice = self.factor * (2 if self.one_sided else 1) / (2 if halved else 1)
        return [self.factor if self.is_own_negative(f) else twice for f in self.kept]


Steps = tuple[tuple[int, Transform], ...]  # dims, and how each is transformed, in order


def analyse(x: Tensor, steps: Steps) -> Tensor:
    """(..., n, ...) real or complex -> (..., k, ...) complex, dim after dim."""
    return _Analysis.apply(x, steps, not x.is_complex())


def synthesise(modes: Tensor, steps: Steps, *, real: bool) -> Tensor:
    """Apply the adjoint of `analyse`, w_f modes_f exp(+2 pi i f n / N) summed, or its real part.

    (..., k, ...) complex -> (..., n, ...) complex or real. The last step is undone first.
    """
    return _Synthesis.apply(modes, steps, real)


def scale(norm: str | None, extents: Sequence[int], *, forward: bool) -> float:
    """torch.fft's normalization: on the forward transform, the backward one, or half on each."""
    count = math.prod(extents)
    if norm == "ortho":
        return count**-0.5
    return 1 / count if (norm == "forward") == forward else 1.0


class _Analysis(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps, real: bool) -> Tensor:
        ctx.plan = steps, real
        modes = x
        with _in_full_precision(x.device):
            for dim, transform in steps:
                modes = (_fft if transform.fft else _product)(modes, dim, transform)
            return modes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Synthesis.apply(grads[0], *ctx.plan), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Analysis.apply(tangents[0], *ctx.plan)


class _Synthesis(Function):
    @staticmethod
    def forward(ctx: Any, modes: Tensor, steps: Steps, real: bool) -> Tensor:
        ctx.plan = steps, real
        x = modes
        with _in_full_precision(modes.device):
            for number in reversed(range(len(steps))):
                dim, transform = steps[number]
                inverse = _inverse_fft if transform.fft else _adjoint
                x = inverse(x, dim, transform, real and number == 0)
            return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Analysis.apply(grads[0], *ctx.plan), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Synthesis.apply(tangents[0], *ctx.plan)


def _product(x: Tensor, dim: int, t: Transform) -> Tensor:
    if x.is_complex():
        return _apply(table(t, "rows", x.dtype, x.device), x, dim)
    if dim == x.ndim - 1:
        modes = _memory((*x.shape[:-1], len(t.kept)), x.dtype.to_complex(), x.device)
        pairs = torch.view_as_real(modes).flatten(-2)
        _apply(table(t, "pairs", x.dtype, x.device), x, dim, out=pairs)
        return modes
    real, imag = _apply(table(t, "halves", x.dtype, x.device), x, dim).chunk(2, dim)
    return torch.complex(real, imag)


def _adjoint(modes: Tensor, dim: int, t: Transform, real: bool) -> Tensor:
    dtype = modes.dtype.to_real()
    if not real:
        return _apply(table(t, "adjoint", modes.dtype, modes.device), modes, dim)
    if dim == modes.ndim - 1:
        pairs = torch.view_as_real(modes.resolve_conj().contiguous()).flatten(-2)
        return _apply(table(t, "pairs", dtype, modes.device).t(), pairs, dim)
    stacked = torch.cat([modes.real, modes.imag], dim)
    return _apply(table(t, "halves", dtype, modes.device).t(), stacked, dim)


def _memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory, of torch's own class: MONAI's tensors make others of their own."""
    return torch.empty(shape, dtype=dtype, device=device)


def _apply(matrix: Tensor, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """Multiply `dim` of `x` by a matrix, into new memory: a Function must return no view."""
    before, (rows, columns), after = x.shape[:dim], matrix.shape, x.shape[dim + 1 :]
    out = _memory((*before, rows, *after), x.dtype, x.device) if out is None else out
    slabs, count = math.prod(before), math.prod(after)
    if dim == x.ndim - 1:
        torch.mm(x.reshape(slabs, columns), matrix.t(), out=out.view(slabs, rows))
    else:
        given, places = x.reshape(slabs, columns, count), out.view(slabs, rows, count)
        torch.bmm(matrix.expand(slabs, -1, -1), given, out=places)
    return out


@made_once
def table(t: Transform, form: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """w_f exp(-2 pi i f n / N) of shape (kept, rows); zero for rows beyond N.

    Args:
        t: The transform.
        form: "rows": complex; "adjoint": its conjugate, transposed; of a real dtype "pairs":
            (2 kept, rows), the real part of each row, then its imaginary part; "halves": all real
            parts, then all imaginary parts.
        dtype: The dtype of the table.
        device: Where it lies.
    """
    f = torch.tensor(t.kept, dtype=torch.int64, device=device)[:, None]
    n = torch.arange(*t.rows, dtype=torch.int64, device=device)
    angle = (f * n % t.extent).double() * (-2 * math.pi / t.extent)
    weights = torch.tensor(t.weights(), dtype=torch.float64, device=device)[:, None]
    matrix = torch.polar((n < t.extent) * weights, angle)
    if form == "pairs":
        matrix = torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)
    elif form == "halves":
        matrix = torch.cat([matrix.real, matrix.imag])
    elif form == "adjoint":
        matrix = matrix.mH.resolve_conj()
    return matrix.to(dtype).contiguous()


def _with_extent(x: Tensor, dim: int, extent: int) -> list[int]:
    """Return the shape of `x` with another extent of a dim."""
    shape = list(x.shape)
    shape[dim] = extent
    return shape


def _fft(x: Tensor, dim: int, t: Transform) -> Tensor:
    if not x.numel():  # torch 2.11 refuses a tensor without elements on the CPU
        return x.new_zeros(_with_extent(x, dim, len(t.kept)), dtype=x.dtype.to_complex())
    transform = fft.fft if x.is_complex() or not t.half() else fft.rfft
    modes = transform(x, t.extent, dim)
    runs = _runs(t.kept)
    if runs != ((0, modes.shape[dim]),):
        modes = torch.cat([modes.narrow(dim, *run) for run in runs], dim)
    if t.one_sided or t.factor != 1:
        weights = _weights(t, modes.dtype.to_real(), modes.device)[:, 0]
        modes.mul_(weights.view(-1, *[1] * (x.ndim - dim - 1)))
    return modes


def _inverse_fft(modes: Tensor, dim: int, t: Transform, real: bool) -> Tensor:
    half = real and t.half()
    if not modes.numel():
        dtype = modes.dtype.to_real() if real else modes.dtype
        return modes.new_zeros(_with_extent(modes, dim, t.rows[1]), dtype=dtype)
    placed = modes.new_zeros(_with_extent(modes, dim, t.extent // 2 + 1 if half else t.extent))
    pairs, places = torch.view_as_real(modes.resolve_conj()), torch.view_as_real(placed)
    weights = _weights(t, pairs.dtype, modes.device, half=half)
    weights = weights.view(-1, *[1] * (modes.ndim - dim - 1), 2)
    start = 0
    for place, size in _runs(t.kept):
        given = pairs.narrow(dim, start, size)
        torch.mul(given, weights.narrow(0, start, size), out=places.narrow(dim, place, size))
        start += size
    if half:
        x = fft.irfft(placed, t.extent, dim, norm="forward")
    else:
        x = fft.ifft(placed, dim=dim, norm="forward")
        x = x.real.clone() if real else x
    missing = t.rows[1] - t.extent
    if missing > 0:
        return torch.cat([x, x.new_zeros(_with_extent(x, dim, missing))], dim)
    return x.narrow(dim, 0, t.rows[1]).clone() if missing else x


@made_once
def _weights(
    t: Transform, dtype: torch.dtype, device: torch.device, *, half: bool = False
) -> Tensor:
    """Weights of real and imaginary parts, of shape (kept, 2).

    A one-sided inverse (`half`) counts each frequency twice, for its negative. The imaginary parts
    of frequencies 0 and N/2 have no weight: of real data they are zero. A CPU does not read them;
    cuFFT does for some extents, such as 2^13 and 2^14
    (https://github.com/pytorch/pytorch/issues/154496).
    """
    weights = torch.tensor(t.weights(halved=half), dtype=torch.float64, device="cpu")
    weights = weights[:, None].repeat(1, 2)
    for place, frequency in enumerate(t.kept):
        if half and t.is_own_negative(frequency):
            weights[place, 1] = 0
    return weights.to(device, dtype)


@lru_cache(maxsize=512)
def highest(kept: Frequencies) -> int:
    """Return the highest frequency; 0 if none is kept."""
    return max(kept[-1:] if isinstance(kept, range) else kept, default=0)


@lru_cache(maxsize=512)
def _runs(kept: Frequencies) -> tuple[tuple[int, int], ...]:
    """`kept` as runs `(first, length)` of consecutive frequencies."""
    if isinstance(kept, range) and kept.step == 1:
        return ((kept.start, len(kept)),) if kept else ()
    runs: list[tuple[int, int]] = []
    for f in kept:
        if runs and f == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((f, 1))
    return tuple(runs)


def _in_full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Neither autocast nor TF32 while open; nothing is opened where neither is on."""
    shortened = device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return _full_precision(device) if shortened or is_autocast() else nullcontext()


@contextmanager
def _full_precision(device: torch.device) -> Generator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
