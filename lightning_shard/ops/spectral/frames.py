"""Spectra of short frames of a signal (torch.stft), and the signal of such spectra (torch.istft).

A frame is a window along the last dim, so a rank brings the samples under its frames. A signal is
the sum of its frames, each of which reaches over the next ones: the ranks exchange those at their
borders.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops.autocast import cast_for, without_autocast
from lightning_shard.ops.registry import composes
from lightning_shard.processes.torch_private.typed import fft, typed_torch


@composes(torch.stft, Tensor.stft)
def stft(
    func: Callable[..., Tensor],
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """(T,) or (B, T) -> (frequencies, frames) or (B, frequencies, frames)."""
    if align_to_window is not None:
        raise UnsupportedOperationError("stft with align_to_window")
    (x,) = cast_for(_of_one, x)
    with without_autocast(x):
        if center:
            sides = [n_fft // 2] * 2
            x = F.pad(x[(None,) * (3 - x.ndim)], sides, pad_mode)[(0,) * (3 - x.ndim)]
        weights = _weights(x, window, n_fft, win_length)
        frames = x.unfold(-1, n_fft, hop_length or n_fft // 4) * weights
        is_complex = frames.is_complex()
        transform = fft.fft if is_complex or onesided is False else fft.rfft
        spectra = transform(frames, norm="ortho" if normalized else None).transpose(-1, -2)
    return spectra if return_complex else torch.view_as_real(spectra)


@composes(typed_torch.istft, Tensor.istft, limits="no return_complex=True")
def istft(
    func: Callable[..., Tensor],
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """(frequencies, frames) or (B, frequencies, frames) -> (T,) or (B, T)."""
    if return_complex:
        raise UnsupportedOperationError("istft with return_complex=True")
    hop, begin = hop_length or n_fft // 4, n_fft // 2 if center else 0
    spectra = x.transpose(-1, -2)[..., : n_fft // 2 + 1]
    frames = fft.irfft(spectra, n_fft, norm="ortho" if normalized else None)
    weights = _weights(frames, window, n_fft, win_length)
    count = frames.shape[-2]
    reach = n_fft + hop * (count - 1)
    end = reach - begin if length is None else min(begin + length, reach)
    signal = _added(frames * weights, hop)[..., begin:end]
    covered = _added((weights * weights).expand(count, n_fft), hop)[begin:end]
    if bool((covered.abs() < 1e-11).any()):
        raise RuntimeError(
            f"istft: the windows leave samples out (window overlap add min: {covered.abs().min()})"
        )
    signal = signal / covered
    missing = 0 if length is None else begin + length - end
    return F.pad(signal, [0, missing]) if missing else signal


def _of_one(x: Tensor) -> Tensor:
    return torch.stft(x, 1, return_complex=True)


def _weights(x: Any, window: Tensor | None, n_fft: int, win_length: int | None) -> Tensor:
    """Return the weights of the samples of a frame, on all ranks."""
    size = win_length or n_fft
    if window is None:
        real = x.dtype.to_real()
        window = torch.ones(size, dtype=real, device=x.device)
    before = (n_fft - size) // 2
    return F.pad(window, [before, n_fft - size - before])


def _added(frames: Any, hop: int) -> Any:
    """Add frames up, each `hop` samples after the one before: (..., frames, N) -> (..., samples).

    A frame is cut into pieces of `hop` samples. The pieces of one number are a signal without gaps.
    """
    count, size = frames.shape[-2:]
    pieces = -(-size // hop)
    frames = F.pad(frames, [0, pieces * hop - size])
    signals = [
        F.pad(frames[..., i * hop : (i + 1) * hop], [0, 0, i, pieces - 1 - i])
        for i in range(pieces)
    ]
    total = sum(signals[1:], signals[0])
    return total.flatten(-2)[..., : size + hop * (count - 1)]
