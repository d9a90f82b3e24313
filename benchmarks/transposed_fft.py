"""The usual distributed spectral convolution, to compare with: FFTs of transposed whole fields.

Rows are split over ranks. Forward: a real FFT along the columns, an all-to-all of the whole half
spectrum after which columns are split, an FFT along the rows; then the modes are cut out, each
rank's with its slice of the weights. The inverse goes the same way back. So do PhysicsNeMo
(physicsnemo/distributed/fft.py, which sends the whole complex spectrum, twice as much) and dfno;
makani cuts the columns before it transposes. Written with the collectives of this package, so that
only the algorithm differs.

Shapes: x (B, C, h, W), or (B, C, h, W, D) with more whole dims.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.comm import transpose
from lightning_shard.domain.layout import partition


def sizes(extent: int, ranks: int) -> list[int]:
    """How many rows each rank has."""
    offsets = partition(extent, ranks)
    return [b - a for a, b in pairwise(offsets)]


def spectral_conv(x: Tensor, weight: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Neuraloperator's layer (even extents) of a field of `rows` rows, of which x has this rank's.

    Args:
        x: This rank's rows.
        weight: (in, out, k0, k1, ..., k_last // 2 + 1), whole.
        rows: H.
        group: The ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    last = x.ndim - 1
    spatial = list(range(3, x.ndim))
    spectrum = torch.fft.rfftn(x, dim=spatial, norm="forward")
    columns = sizes(spectrum.shape[last], ranks)
    whole = transpose(spectrum, last, 2, columns, sizes(rows, ranks), group)
    whole = torch.fft.fft(whole, dim=2, norm="forward")
    low = sum(columns[:rank])
    high = max(low, min(low + columns[rank], weight.shape[-1]))
    out = torch.zeros(
        (x.shape[0], weight.shape[1], *whole.shape[2:]), dtype=whole.dtype, device=x.device
    )
    shifted = list(range(2, last))
    whole, out = torch.fft.fftshift(whole, dim=shifted), torch.fft.fftshift(out, dim=shifted)
    place = [
        slice(n // 2 - k // 2, n // 2 - k // 2 + k)
        for n, k in zip(whole.shape[2:last], weight.shape[2:-1], strict=True)
    ]
    modes = (slice(None), slice(None), *place, slice(0, high - low))
    letters = "xyz"[: x.ndim - 2]
    out[modes] = torch.einsum(
        f"bi{letters},io{letters}->bo{letters}", whole[modes], weight[..., low:high]
    )
    out = torch.fft.ifftshift(out, dim=shifted)
    out = torch.fft.ifft(out, dim=2, norm="forward")
    back = transpose(out, 2, last, sizes(rows, ranks), columns, group)
    return torch.fft.irfftn(back, s=list(x.shape[3:]), dim=spatial, norm="forward")
