"""Truncated discrete Fourier transforms as matrix products, and their adjoints.

A dim of N rows of which k frequencies are kept is one (k, N) matrix; a rank applies its columns to
its rows. Phases are exact integers (f n) mod N, turned into float64 angles, and cast last. Products
run in full float32 (or float64) whatever autocast and the TF32 switch say: truncated inputs would
cost three digits. Real data takes one real product with interleaved cosines and sines for its last
dim.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Frequencies = tuple[int, ...]


@lru_cache(maxsize=512)
def table(
    extent: int, frequencies: Frequencies, rows: tuple[int, int], sign: int, device: torch.device
) -> Tensor:
    """exp(sign 2 pi i f n / N), complex128, of shape (frequencies, rows `[low, high)`).

    Rows beyond the extent N are zero: a transform of N points ignores them.
    """
    with torch.inference_mode(False):  # the table may be made in validation and used in training
        f = torch.tensor(frequencies, dtype=torch.int64, device=device)[:, None]
        n = torch.arange(*rows, dtype=torch.int64, device=device)
        angle = (f * n % extent).double() * (sign * 2 * math.pi / extent)
        return torch.polar((n < extent).double().expand_as(angle), angle)


def scale(norm: str | None, extents: Sequence[int], sign: int) -> float:
    """torch.fft's normalization: on the forward transform, the backward one, or half on each."""
    count = math.prod(extents)
    if norm == "ortho":
        return count**-0.5
    return 1 / count if (norm == "forward") == (sign < 0) else 1.0


def to_modes(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """(..., n, ...) -> (..., k, ...) with a complex (k, n) matrix; of real `x` the last dim."""
    if x.is_complex():
        return _product(x, dim, matrix)
    interleaved = torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)
    pairs = _product(x, dim, interleaved)
    return torch.view_as_complex(pairs.unflatten(-1, (matrix.shape[0], 2)).contiguous())


def to_real_rows(modes: Tensor, matrix: Tensor) -> Tensor:
    """Re(sum over k of modes times matrix): (..., k) -> (..., n) with a complex (k, n) matrix."""
    pairs = torch.view_as_real(modes.contiguous()).flatten(-2)
    real = torch.stack([matrix.real, -matrix.imag], 1).flatten(0, 1)
    return _product(pairs, pairs.ndim - 1, real.t())


def _product(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    return _Product.apply(x, matrix.to(x.dtype), dim)


class _Product(Function):
    """`matrix` applied along `dim` in full precision; linear in x, with its true adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, dim: int) -> Tensor:
        ctx.matrix, ctx.dim = matrix, dim
        with torch.autocast(x.device.type, enabled=False), _FullPrecision(x.device):
            if dim == x.ndim - 1:
                return torch.matmul(x, matrix.t())
            before, after = x.shape[:dim], x.shape[dim + 1 :]
            slabs = x.reshape(math.prod(before), x.shape[dim], math.prod(after))
            return torch.matmul(matrix, slabs).view(*before, matrix.shape[0], *after)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Product.apply(grads[0], ctx.matrix.mH, ctx.dim), None, None


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
