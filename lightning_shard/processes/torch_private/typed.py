"""Types that a type checker cannot find by itself.

torch declares some functions without types, among them all of `fft`, `linalg` and `special`. Here
the same functions have types. A checker that reads `isinstance(value, list)` complains that it does
not know what is in the list; after `is_list(value)` it takes that to be anything. This module lies
in the lowest room because all rooms above may import it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

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


def is_list(value: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def is_sequence(value: object) -> TypeIs[Sequence[Any]]:
    return isinstance(value, Sequence)


def is_dict(value: object) -> TypeIs[dict[Any, Any]]:
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeIs[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def integers(x: Tensor) -> list[int]:
    """The numbers in a tensor of one dim."""
    return x.tolist()


def named_modules(
    root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """`root` and every module below it, each with its path."""
    return root.named_modules(remove_duplicate=remove_duplicate)
