# Types for typed.py, by which checkers read torch's functions without types.

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

ToTensor = Callable[..., Tensor]
ToTensors = Callable[..., tuple[Tensor, ...]]

class Random(Protocol):
    @property
    def fork_rng(self) -> Callable[..., AbstractContextManager[None]]: ...

class Torch(Protocol):
    atleast_1d: ToTensor
    atleast_2d: ToTensor
    atleast_3d: ToTensor
    broadcast_shapes: Callable[..., torch.Size]
    broadcast_tensors: ToTensors
    istft: ToTensor
    manual_seed: Callable[[int], torch.Generator]
    norm: ToTensor
    tensordot: ToTensor
    unique: ToTensors

class Fft(Protocol):
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
    multi_dot: ToTensor
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
    log_softmax: ToTensor
    logsumexp: ToTensor
    softmax: ToTensor

typed_torch: Torch
random: Random
fft: Fft
linalg: Linalg
special: Special

def integers(x: Tensor) -> list[int]: ...
def named_modules(
    root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]: ...
