import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests.parity import assert_parity, assert_parity_of_module, mesh_of

CASES = {
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), (2, 8, 7, 5)),
    "shuffle_3": (lambda x: F.pixel_shuffle(x, 3), (9, 4, 5)),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 3, 14, 10)),
    "unshuffle_3": (lambda x: F.pixel_unshuffle(x, 3), (2, 12, 9)),
    "channels": (lambda x: F.channel_shuffle(x, 2), (2, 4, 7, 5)),
    "unfold": (lambda x: F.unfold(x, 3), (2, 3, 7, 5)),
    "unfold_padding": (lambda x: F.unfold(x, (3, 2), (1, 2), 1, (2, 1)), (2, 3, 9, 6)),
    "unfold_unbatched": (lambda x: F.unfold(x, 3, 2, 2, 2), (3, 9, 6)),
    "unfold_gaps": (lambda x: F.unfold(x, 2, stride=3), (2, 3, 11, 8)),
    "sliding": (lambda x: (x.unfold(-2, 3, 2), x.unfold(-1, 2, 1)), (2, 3, 7, 5)),
    "sliding_all": (lambda x: x.unfold(1, 2, 1).unfold(2, 3, 3).unfold(3, 1, 2), (2, 3, 8, 5)),
    "fold": (lambda x: F.fold(F.unfold(x, 3).pow(2), (7, 5), 3), (2, 3, 7, 5)),
    "fold_padding": (
        lambda x: F.fold(F.unfold(x, 3, 2, 2, 2).pow(2), (9, 6), 3, 2, 2, 2),
        (2, 3, 9, 6),
    ),
    "fold_apart": (lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 6), 2, stride=2), (2, 3, 8, 6)),
    "fold_gaps": (lambda x: F.fold(F.unfold(x, 2, stride=3), (11, 8), 2, stride=3), (3, 11, 8)),
    "one_row": (lambda x: F.fold(F.unfold(x, (7, 2)), (7, 5), (7, 2)), (2, 3, 7, 5)),
}
SMOOTH = ["shuffle", "unshuffle", "channels", "unfold", "fold"]


@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[0, 2], [1, 3]])
@pytest.mark.parametrize("case", ["channels", "unfold", "unfold_padding", "fold", "fold_padding"])
def test_split_batch_and_channels(case, dims):
    function, shape = CASES[case]
    assert_parity(function, [shape], {0: dims}, mesh_of(2, 2))


TINY = {
    "sliding": (lambda x: x.unfold(-2, 3, 1) * 2, (2, 3, 4, 5)),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), (2, 4, 2, 5)),
    "shuffle_one": (lambda x: F.pixel_shuffle(x, 2), (2, 4, 1, 5)),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 3, 6, 4)),
    "unfold": (lambda x: F.unfold(x, 3), (2, 3, 4, 5)),
    "fold": (lambda x: F.fold(F.unfold(x, 3), (4, 5), 3), (2, 3, 4, 5)),
    "fold_one": (lambda x: F.fold(F.unfold(x, 3, padding=1), (1, 5), 3, padding=1), (2, 3, 1, 5)),
    "channels": (lambda x: F.channel_shuffle(x, 2), (2, 4, 2, 5)),
}


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", TINY)
def test_fewer_rows_than_ranks(case):
    function, shape = TINY[case]
    assert_parity(function, [shape], {0: [2]}, mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fold_of_blocks_that_were_split(dim):
    """Also where the places themselves are split: their rows move to where they belong."""
    function = lambda x: F.fold(x, (8, 5), 2)  # noqa: E731
    assert_parity(function, [(2, 12, 28)], {0: [dim]}, mesh_of(3))


MODULES = {
    "shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.PixelShuffle(2)), (2, 3, 7, 5)),
    "unshuffle": (lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 2, 1)), (2, 3, 6, 8)),
    "blocks": (lambda: nn.Sequential(nn.Unfold(2), nn.Fold((7, 5), 2)), (2, 3, 7, 5)),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    make, shape = MODULES[name]
    assert_parity_of_module(make().double(), shape, [2], mesh_of(3))


@pytest.mark.spmd(3)
def test_refusals():
    x = torch.randn(2, 8, 7, 5)
    with pytest.raises(UnsupportedOperationError, match="split channels"):
        F.pixel_shuffle(lightning_shard.shard(x, mesh_of(3), 1), 2)
    with pytest.raises(RuntimeError, match="divisible"):
        F.pixel_unshuffle(lightning_shard.shard(x, mesh_of(3), 2), 2)
    with pytest.raises(RuntimeError, match="sliding blocks"):
        F.unfold(lightning_shard.shard(x, mesh_of(3), 2), 9)
    with pytest.raises(RuntimeError, match="calculated number of sliding blocks"):
        F.fold(lightning_shard.shard(torch.randn(2, 8, 7), mesh_of(3), 2), (3, 3), 2)
