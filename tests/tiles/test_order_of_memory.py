"""Results lie in memory as those of one process: exact random numbers are drawn in that order."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard import Tiles, UnsupportedOperationError, gather, shard, use_exact_random
from lightning_shard.tiles.tile_tensor import TileTensor
from tests.ops.families import FAMILIES
from tests.pairs import choose
from tests.parity import assert_same

ROW_BY_ROW, CHANNELS_LAST, COLUMNS_FIRST = (0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2)
# torch's results of an index or a mask lie as their operand does; ours do where it lies row by row
BY_NUMBERS = {"lookup", "mask", "select"}
OTHERWISE = {
    *itertools.product(BY_NUMBERS, (CHANNELS_LAST, COLUMNS_FIRST)),
    ("reshape", COLUMNS_FIRST),  # a view, which would need rows of other tiles
}
APART = {"index_copy", "after_a_slice"}  # their rows are made apart


def laid(x: Tensor, order: Sequence[int]) -> Tensor:
    """A copy of a tensor, with its dims in memory in an order."""
    return x.permute(*order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def order_of(x: Tensor) -> list[int]:
    return sorted([d for d in range(x.ndim) if x.shape[d] > 1], key=lambda d: -x.stride(d))


ORDERS = ROW_BY_ROW, CHANNELS_LAST, COLUMNS_FIRST


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on memory and deprecated words
@pytest.mark.parametrize(
    ("family", "order"),
    [row for row in choose(FAMILIES, ORDERS, every=2) if row.values not in OTHERWISE],
)
def test_results_lie_as_in_one_process(family: str, order: tuple[int, ...]) -> None:
    tried, wrong = 0, list[str]()
    for name, dim in itertools.product(FAMILIES[family].cases, (2, 3)):
        function, (first, *others) = FAMILIES[family].case(name)
        if len(first) != 4 or name in APART:
            continue
        torch.manual_seed(0)
        given, *plain = (torch.randn(s, dtype=torch.float64) for s in (first, *others))
        try:
            made = function(shard(laid(given, order), Tiles((3,)), dim), *plain)
        except UnsupportedOperationError:
            continue
        if name.startswith("view") and order != ROW_BY_ROW:
            continue  # torch has no view of it
        expected = function(laid(given, order), *plain)
        if not isinstance(made, TileTensor) or not isinstance(expected, Tensor):
            continue
        tried += 1
        local = made.parts[0].local
        few = [d for d in range(local.ndim) if local.shape[d] == 1 < expected.shape[d]]
        if not few and order_of(local) != order_of(expected):
            wrong.append(f"{name} split along {dim}: {order_of(local)}, {order_of(expected)}")
    assert tried or "loss" in family  # a number
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("order", [CHANNELS_LAST, COLUMNS_FIRST])
def test_noise_after_a_norm_of_a_turned_field(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 6, dtype=torch.float64)

    def noisy(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        x = F.dropout(F.instance_norm(x), 0.3, True)
        return F.dropout((2 * x).softmax(2).flip(2), 0.3, True) + torch.randn_like(x)

    with use_exact_random():
        found = gather(noisy(shard(laid(x, order), Tiles((3,)), 2)))
        assert_same(found, noisy(laid(x, order)))
