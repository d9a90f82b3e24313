"""The bytes that a rank sends: the least that its peers' outputs need, and none where none is.

Tensors are float64 of shape (2, 4, 12, 10) over two ranks, rows split: a row is 640 bytes, a rank's
part six rows. Sent is counted on rank 0, forward and backward apart.
"""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import mesh_of

SHAPE = (2, 4, 12, 10)
ROW = 2 * 4 * 10 * 8
PART = 6 * ROW
NUMBER = 8


def kernel(*shape):
    return torch.ones(shape, dtype=torch.float64)


def zeros(x):
    """Twelve row numbers, split as the rows, which all name row 0 of rank 0."""
    return (x[0, 0, :, 0].detach() * 0).long()


TOLD = 5 * NUMBER  # whether a number is out of range, and how many rows are wanted of each rank

# name: function of the split tensor, bytes forward, bytes backward (None: no gradient)
CASES = {
    "relu": (torch.relu, 0, 0),
    "gelu": (F.gelu, 0, 0),
    "add": (lambda x: x + x * 2, 0, 0),
    "where": (lambda x: torch.where(x > 0, x, 0), 0, 0),
    "add_bias": (lambda x: x + kernel(4, 1, 1), 0, 0),
    "add_field": (lambda x: x * kernel(12, 10), 0, 0),
    "dropout": (lambda x: F.dropout(x, 0.5), 0, 0),
    "cast": (lambda x: x.float(), 0, 0),
    "conv_1x1": (lambda x: F.conv2d(x, kernel(4, 4, 1, 1)), 0, 0),
    "conv_patches": (lambda x: F.conv2d(x, kernel(4, 4, 2, 2), stride=2), 0, 0),
    "conv_3x3": (lambda x: F.conv2d(x, kernel(4, 4, 3, 3), padding=1), ROW, ROW),
    "conv_5x5": (lambda x: F.conv2d(x, kernel(4, 4, 5, 5), padding=2), 2 * ROW, 2 * ROW),
    "conv_1x3": (lambda x: F.conv2d(x, kernel(4, 4, 1, 3), padding=(0, 1)), 0, 0),
    "conv_dilated": (
        lambda x: F.conv2d(x, kernel(4, 4, 3, 3), padding=2, dilation=2), 2 * ROW, 2 * ROW
    ),
    "conv_strided": (  # rank 1 begins at output row 3, whose window begins at input row 5
        lambda x: F.conv2d(x, kernel(4, 4, 3, 3), padding=1, stride=2), ROW, 0
    ),
    "conv_transposed_patches": (
        lambda x: F.conv_transpose2d(x, kernel(4, 4, 2, 2), stride=2), 0, 0
    ),
    "max_pool_2": (lambda x: F.max_pool2d(x, 2), 0, 0),
    "max_pool_3": (lambda x: F.max_pool2d(x, 3, 1, 1), ROW, ROW),
    "avg_pool_2": (lambda x: F.avg_pool2d(x, 2), 0, 0),
    "adaptive_pool_6": (lambda x: F.adaptive_avg_pool2d(x, (6, 5)), 0, 0),
    "adaptive_pool_1": (lambda x: F.adaptive_avg_pool2d(x, 1), 8 * NUMBER, 8 * NUMBER),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), 0, 0),
    "bilinear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), ROW, ROW
    ),
    "pad_rows": (lambda x: F.pad(x, (0, 0, 1, 1)), 0, 0),
    "pad_columns": (lambda x: F.pad(x, (1, 1, 0, 0), "circular"), 0, 0),
    "roll_rows": (lambda x: x.roll(1, 2), ROW, ROW),
    "roll_columns": (lambda x: x.roll(1, 3), 0, 0),
    "flip_rows": (lambda x: x.flip(2), PART, PART),
    "slice_columns": (lambda x: x[..., 2:7], 0, 0),
    "slice_halves": (lambda x: x[:, :, ::2], 0, 0),
    "diff": (lambda x: x.diff(dim=2), 0, ROW),
    "cat_channels": (lambda x: torch.cat([x, x], 1), 0, 0),
    "permute": (lambda x: x.permute(0, 2, 3, 1), 0, 0),
    "flatten": (lambda x: x.flatten(2).transpose(1, 2), 0, 0),
    "rearrange": (lambda x: x.reshape(2, 2, 2, 12, 10).transpose(1, 2).flatten(1, 2), 0, 0),
    "sum": (torch.sum, NUMBER, NUMBER),
    "mean_of_rows": (lambda x: x.mean(2), ROW, ROW),
    "sum_of_channels": (lambda x: x.sum(1), 0, 0),
    "softmax_of_channels": (lambda x: x.softmax(1), 0, 0),
    "layer_norm": (lambda x: F.layer_norm(x, (10,)), 0, 0),
    "linear": (lambda x: F.linear(x, kernel(3, 10)), 0, 0),
    "einsum": (lambda x: torch.einsum("bchw,oc->bohw", x, kernel(3, 4)), 0, 0),
    "mse": (lambda x: F.mse_loss(x, torch.zeros(SHAPE).double()), NUMBER, NUMBER),
    "cumsum_of_columns": (lambda x: x.cumsum(3), 0, 0),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), ROW, ROW),
    "mask_of_all": (lambda x: x[0, 0][x[0, 0] > -100], NUMBER, 0),  # the count alone
    "mask_of_upper_half": (  # half of which goes to the other rank
        lambda x: x[0, 0][torch.arange(120).reshape(12, 10) < 60], NUMBER + 30 * NUMBER, 0
    ),
    "rows_by_index": (lambda x: x[0, 0][zeros(x)], TOLD + 6 * 10 * NUMBER, 0),
    "gather": (lambda x: x[0, 0].gather(0, zeros(x)[:, None]), TOLD + 6 * NUMBER, 0),
    "index_add": (lambda x: x[0, 0].index_add(0, zeros(x), x[0, 1]), TOLD, 6 * 10 * NUMBER),
    "scatter_add_of_rows": (  # which of both it is, a number for each row, the rows
        lambda x: x[0, 0].scatter_add(0, zeros(x)[:, None].expand_as(x[0, 1]), x[0, 1]),
        1 + TOLD, 6 * 10 * NUMBER,
    ),
    "index_add_to_plain": (
        lambda x: kernel(4).index_add(0, zeros(x), x[0, 0, :, 0]), 7 * NUMBER, 4 * NUMBER
    ),
    "assigned_by_mask": (
        lambda x: x[0, 0].masked_scatter(x[0, 0] > -100, x[0, 1]), NUMBER, 0
    ),
    "sort_of_columns": (lambda x: x.sort(3).values, 0, 0),
    "sort_of_rows": (  # to the columns and back, with the indices
        lambda x: x.sort(2).values, 3 * PART // 2, PART
    ),
}  # fmt: skip


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", CASES)
def test_bytes_sent(name):
    function, forward, backward = CASES[name]
    whole = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    x = lightning_shard.shard(whole, mesh_of(2), 2)
    with counted() as sent:
        result = function(x)
    found = [sent.bytes]
    local = result.to_local() if isinstance(result, lightning_shard.DomainTensor) else result
    with counted() as sent:
        torch.autograd.grad(local, whole, torch.ones_like(local))
    found.append(sent.bytes)
    rank = torch.distributed.get_rank()
    if rank == 0:
        assert found == [forward, backward]
    else:
        assert sum(found) <= sum((forward, backward)) + 2 * ROW
