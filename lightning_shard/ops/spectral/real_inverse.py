"""The inverse real transform of a plain tensor, with the numbers of a CPU on every device.

A spectrum of real data is Hermitian. A CPU ignores what other spectra have beside that, after the
complex transforms of all dims but the last. cuFFT takes it as given, and some of its results differ
(https://github.com/pytorch/pytorch/issues/154496).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_shard.domain.cache import made_once
from lightning_shard.processes.torch_private.typed import fft


class InversesOfCpu(TorchFunctionMode):
    """Inside, `torch.fft.irfftn` computes on every device what it computes on a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = real_inverse if func is fft.irfftn else func
        return function(*args, **(kwargs or {}))


def real_inverse(
    x: Tensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
) -> Tensor:
    """Compute `torch.fft.irfftn` as a CPU does: (..., n // 2 + 1) -> (..., n).

    Args:
        x: The spectrum.
        s: The extents of the result; by default those of the spectrum, and an even last one.
        dim: The transformed dims; by default the last ones, as many as `s` names, or all.
        norm: The normalization, by torch's names.
    """
    if dim is None:
        dim = range(-(x.ndim if s is None else len(s)), 0)
    *others, last = dim
    if others:
        x = fft.ifftn(x, None if s is None else s[:-1], others, norm)
    count = x.shape[last]
    extent = 2 * (count - 1) if s is None or s[-1] == -1 else s[-1]
    kept = _real_ends(count, extent, x.dtype.to_real(), x.device)
    pairs = torch.view_as_real(x) * kept.view(-1, *[1] * (x.ndim - 1 - last % x.ndim), 2)
    return fft.irfft(torch.view_as_complex(pairs), extent, last, norm)


@made_once
def _real_ends(count: int, extent: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Factors of real and imaginary parts, (count, 2): 0 for those that real data has not."""
    kept = torch.ones(count, 2, dtype=dtype, device="cpu")
    kept[0, 1] = 0
    if extent % 2 == 0 and extent // 2 < count:
        kept[extent // 2, 1] = 0
    return kept.to(device)
