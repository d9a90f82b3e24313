"""torch's functions that torch declares without types, with types.

Among them are all of `fft`, `linalg` and `special`. A stub package cannot give them types: a
checker reads a partial one only for a package that says itself that it is partial, which torch
does not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

ToTensor = Callable[..., Tensor]
ToTensors = Callable[..., tuple[Tensor, ...]]


class Random(Protocol):
    """The function of `torch.random` that lacks a type."""

    @property
    def fork_rng(self) -> Callable[..., AbstractContextManager[None]]: ...


class Torch(Protocol):
    """The functions of `torch` itself that lack a type."""

    atleast_1d: ToTensor
    atleast_2d: ToTensor
    atleast_3d: ToTensor
    broadcast_shapes: Callable[..., torch.Size]
    broadcast_tensors: ToTensors
    manual_seed: Callable[[int], torch.Generator]
    norm: ToTensor
    tensordot: ToTensor
    unique: ToTensors


class Fft(Protocol):
    """The functions of `torch.fft` that this package names."""

    fft: ToTensor
    fftn: ToTensor
    fftshift: ToTensor
    hfft: ToTensor
    hfft2: ToTensor
    hfftn: ToTensor
    ifft: ToTensor
    ifftn: ToTensor
    ifftshift: ToTensor
    ihfft: ToTensor
    ihfft2: ToTensor
    ihfftn: ToTensor
    irfft: ToTensor
    irfft2: ToTensor
    irfftn: ToTensor
    rfft: ToTensor
    rfft2: ToTensor
    rfftn: ToTensor


class Linalg(Protocol):
    """The functions of `torch.linalg` that this package names."""

    cholesky: ToTensor
    cholesky_ex: ToTensors
    cond: ToTensor
    cross: ToTensor
    det: ToTensor
    diagonal: ToTensor
    eig: ToTensors
    eigh: ToTensors
    eigvals: ToTensor
    eigvalsh: ToTensor
    inv: ToTensor
    inv_ex: ToTensors
    lu: ToTensors
    lu_factor: ToTensors
    matmul: ToTensor
    matrix_exp: ToTensor
    matrix_norm: ToTensor
    matrix_power: ToTensor
    matrix_rank: ToTensor
    norm: ToTensor
    pinv: ToTensor
    qr: ToTensors
    slogdet: ToTensors
    solve: ToTensor
    solve_triangular: ToTensor
    svd: ToTensors
    svdvals: ToTensor
    vecdot: ToTensor
    vector_norm: ToTensor


class Special(Protocol):
    """The functions of `torch.special` that this package names."""

    log_softmax: ToTensor
    logsumexp: ToTensor
    softmax: ToTensor


typed_torch: Torch = torch
random: Random = torch.random
fft: Fft = torch.fft
linalg: Linalg = torch.linalg
special: Special = torch.special


def integers(x: Tensor) -> list[int]:
    """Return the entries of a tensor of integers, shape (n,), as a list."""
    return x.tolist()


def named_modules(
    root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `root` and every module below it, each with its path."""
    return root.named_modules(remove_duplicate=remove_duplicate)
