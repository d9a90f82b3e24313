"""A split row of which no rank has all, in order: values, places, gradients."""

import pytest
import torch

import lightning_shard
from tests.parity import assert_double_backward, assert_parity, mesh_of


def weighted(x, *, descending):
    values, places = x.sort(descending=descending)
    weights = torch.arange(1.0, len(x) + 1, dtype=x.dtype)
    return values * weights, places, values[places] ** 2


def compare(extents, mesh, dims):
    for extent in extents:
        for descending in (False, True):

            def call(x, descending=descending):
                return weighted(x, descending=descending)

            assert_parity(call, [(extent,)], {0: dims}, mesh_of(*mesh))
            if extent:
                assert_double_backward(
                    lambda x, call=call: call(x)[::2], [(extent,)], {0: dims}, mesh_of(*mesh)
                )


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_extents(ranks, run_each):
    run_each(ranks, compare, {"": {"extents": [0, 1, 2, 5, 29], "mesh": (ranks,), "dims": [0]}})


SAMPLES = {
    "equal": torch.zeros(13),
    "many equal": torch.tensor([2, 1, 1, 0, 2, 1, 1, 1, 2, 0, 1]),
    "in order": torch.arange(12.0),
    "truth values": torch.tensor([1, 0, 0, 1, 1, 0, 1]).bool(),
    "nan and inf": torch.tensor([float("nan"), 1, float("-inf"), 0, float("nan"), 5, float("inf")]),
    "half": torch.randn(17, generator=torch.Generator().manual_seed(1)).half(),
    "all nan": torch.full((5,), float("nan")),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("descending", [False, True])
def test_order_of_one_process(name, descending):
    whole = SAMPLES[name]
    x = lightning_shard.shard(whole, mesh_of(3), 0)
    expected = whole.sort(stable=True, descending=descending)
    found = x.sort(dim=0, stable=True, descending=descending)
    for own, value in zip(found, expected, strict=True):
        torch.testing.assert_close(
            lightning_shard.gather(own), value, equal_nan=True, rtol=0, atol=0
        )
    places = lightning_shard.gather(x.argsort(0, descending))
    torch.testing.assert_close(places, expected.indices)


@pytest.mark.spmd(4)
def test_of_what_a_mask_chooses_and_of_flattened_dims():
    def call(x):
        column = x[:1].permute(1, 2, 0).flatten()
        return x[x > 0].sort(descending=True).values, column.msort(), column[:, None].sort(0)[0]

    assert_parity(call, [(2, 7, 5)], {0: [1, 2]}, mesh_of(2, 2))
    assert_parity(call, [(2, 7, 5)], {0: [2]}, mesh_of(4))
