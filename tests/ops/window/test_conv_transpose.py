import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests.parity import assert_parity, assert_parity_of_module, mesh_of


def conv(*args, **kwargs):
    return lambda x, w, b: F.conv_transpose2d(x, w, b, *args, **kwargs)


IMAGE = (2, 4, 7, 5)
CASES = {
    "plain": (conv(), [IMAGE, (4, 3, 3, 3), (3,)]),
    "pointwise": (conv(), [IMAGE, (4, 3, 1, 1), (3,)]),
    "double": (conv(2), [IMAGE, (4, 3, 2, 2), (3,)]),
    "stride": (conv(2, 1, 1), [IMAGE, (4, 3, 3, 3), (3,)]),
    "stride_4": (conv(4, 1, 2), [IMAGE, (4, 3, 5, 4), (3,)]),
    "gaps": (conv(4, 0, 3), [IMAGE, (4, 3, 2, 2), (3,)]),
    "gaps_padding": (conv(5, 1, 1), [IMAGE, (4, 3, 2, 1), (3,)]),
    "dilation": (conv(2, 2, 1, dilation=3), [IMAGE, (4, 3, 3, 2), (3,)]),
    "dilated_gaps": (conv(3, 1, dilation=2), [IMAGE, (4, 3, 2, 3), (3,)]),
    "groups": (conv(2, 1, 1, groups=2), [IMAGE, (4, 3, 3, 3), (6,)]),
    "per_dim": (conv((2, 3), (1, 0), (1, 2), dilation=(1, 2)), [IMAGE, (4, 3, 3, 2), (3,)]),
    "wide": (conv(1, 3), [IMAGE, (4, 3, 7, 7), (3,)]),
    "wide_stride": (conv(2, 5, 1), [IMAGE, (4, 3, 11, 9), (3,)]),
    "no_bias": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [IMAGE, (4, 3, 3, 3)]),
    "output_padding_of_dilation": (conv(2, 0, 2, dilation=3), [IMAGE, (4, 3, 2, 2), (3,)]),
    "volume": (
        lambda x, w, b: F.conv_transpose3d(x, w, b, 2, 1, 1),
        [(2, 4, 5, 4, 3), (4, 2, 3, 3, 3), (2,)],
    ),
}
SMOOTH = ["stride"]


UNBATCHED = {
    "line": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1), [(4, 7), (4, 3, 3), (3,)], 1),
    "image": (conv(2, 1), [(4, 5, 7), (4, 3, 3, 4), (3,)], 2),
    "single_row": (conv(2, 1, 1), [(2, 4, 1, 5), (4, 3, 3, 3), (3,)], 2),
    "two_rows": (conv(1, 1), [(2, 4, 2, 5), (4, 3, 3, 3), (3,)], 2),
    "shrinks": (conv(1, 3), [(2, 4, 6, 5), (4, 3, 3, 4), (3,)], 2),
    "one_output_row": (conv(1, 2), [(2, 4, 3, 5), (4, 3, 3, 3), (3,)], 2),
    "gaps": (conv(5), [(2, 4, 2, 3), (4, 3, 1, 1), (3,)], 3),
}


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", UNBATCHED)
def test_unbatched_and_tiny(case):
    function, shapes, dim = UNBATCHED[case]
    assert_parity(function, shapes, {0: [dim]}, mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", ["stride", "gaps", "wide"])
def test_single_precision(case):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: [2]}, mesh_of(3), dtype=torch.float32)


class ToSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)

    def forward(self, x):
        return self.up(x, output_size=(14, 10))


MODULES = {"to_size": ToSize, "double": lambda: nn.ConvTranspose2d(4, 2, 2, 2)}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    assert_parity_of_module(MODULES[name]().double(), IMAGE, [2], mesh_of(3))


@pytest.mark.spmd(3)
def test_split_channels_and_the_way_out():
    """As of fields that Anderson's acceleration keeps in one tensor: it need not be flat."""
    x, weight = torch.randn(IMAGE), torch.randn(3, 4, 3, 3)
    split = lightning_shard.shard(x, mesh_of(3), 2)
    flat = torch.zeros(IMAGE[0], 2, x[0].numel())
    kept = torch.zeros(IMAGE[0], 2, *IMAGE[1:])
    flat[:, 1], kept[:, 1] = split.flatten(1), split
    with pytest.raises(UnsupportedOperationError, match=r"split channels.*; keep its dims"):
        F.conv2d(flat[:, 1].view(IMAGE), weight, padding=1)
    found = lightning_shard.gather(F.conv2d(kept[:, 1], weight, padding=1))
    torch.testing.assert_close(found, F.conv2d(x, weight, padding=1))


@pytest.mark.spmd(3)
def test_refusals():
    x, weight = torch.randn(IMAGE), torch.randn(4, 3, 3, 3)
    with pytest.raises(UnsupportedOperationError, match="split channels"):
        F.conv_transpose2d(lightning_shard.shard(x, mesh_of(3), 1), weight)
    with pytest.raises(RuntimeError, match="output padding must be smaller"):
        F.conv_transpose2d(lightning_shard.shard(x, mesh_of(3), 2), weight, output_padding=1)
    with pytest.raises(RuntimeError) as caught:
        F.conv_transpose2d(lightning_shard.shard(x, mesh_of(3), 2), weight, padding=5)
    assert str(caught.value) == (  # not that of the device's library
        "Given input size per channel: [7, 5]. Calculated output size per channel: [-1, -3]. "
        "Output size is too small"
    )
