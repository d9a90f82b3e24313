"""A split row of which no rank has all, in order: values, places, gradients."""

import pytest
import torch

import lightning_shard
from tests.pairs import choose
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


@pytest.mark.quick_rows("1")
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
@pytest.mark.parametrize(("descending", "name"), choose([False, True], SAMPLES))
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


def statistics(x):
    quarters = torch.tensor([0.1, 0.5, 1.0], dtype=x.dtype)
    modes = ["linear", "lower", "higher", "midpoint", "nearest"]
    return (
        *(x.quantile(quarters, 0, interpolation=mode) for mode in modes),
        x.quantile(0.3),
        torch.nanquantile(x, quarters, keepdim=True),
        torch.quantile(x, 0.7, dim=0, keepdim=True),
        *x.median(0),
        *torch.nanmedian(x, 0, keepdim=True),
        x.median(),
        torch.nanmedian(x),
        *x.kthvalue(4, 0),
        *torch.kthvalue(x, 2, keepdim=True),
    )


def compare_statistics(mesh, dims):
    def of_row(x):
        return (
            statistics(x.flatten()),
            x.median(),
            x.quantile(0.4),
            x[:1].quantile(0.2, keepdim=True),
        )

    def flat(x):
        first, *rest = of_row(x)
        return *first, *rest

    shape = (2, *([7, 5] if len(dims) > 1 else [13]))
    assert_parity(flat, [shape], {0: dims}, mesh_of(*mesh))
    assert_double_backward(
        lambda x: [t for t in flat(x) if t.is_floating_point()], [shape], {0: dims}, mesh_of(*mesh)
    )


@pytest.mark.quick_rows("1")
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_statistics_of_one_row(ranks, run_each):
    run_each(ranks, compare_statistics, {"": {"mesh": (ranks,), "dims": [1]}})


@pytest.mark.slow
def test_statistics_of_all_elements(run_each):
    run_each(4, compare_statistics, {"": {"mesh": (2, 2), "dims": [1, 2]}})


@pytest.mark.spmd(3)
def test_statistics_of_a_row_among_dims_of_extent_one():
    """One number, or two quantiles, with as many dims of extent 1 as torch leaves."""
    functions = {
        "median": lambda x, keep: x.median(1, keepdim=keep),
        "nanmedian": lambda x, keep: x.nanmedian(1, keep)[0],
        "kthvalue": lambda x, keep: x.kthvalue(1, dim=1, keepdim=keep),
        "quantile": lambda x, keep: x.quantile(0.4, 1, keepdim=keep),
        "quantiles": lambda x, keep: torch.nanquantile(
            x, torch.tensor([0.1, 0.9], dtype=x.dtype), 1, keep
        ),
    }
    for extent in (1, 5):
        for function in functions.values():
            for keep in (False, True):
                assert_parity(
                    lambda x, f=function, k=keep: f(x, k), [(1, extent, 1)], {0: [1]}, mesh_of(3)
                )


@pytest.mark.spmd(3)
def test_statistics_of_rows_with_nan_and_of_equal_elements():
    for values in ([float("nan"), 1, 0, float("nan"), 5], [float("nan")] * 4, [1.0, 1, 2, 1, 2]):
        for function in (torch.median, torch.nanmedian):
            whole = torch.tensor(values, requires_grad=True)
            given = whole.detach().clone().requires_grad_()
            expected, found = function(whole), function(lightning_shard.shard(given, mesh_of(3), 0))
            torch.testing.assert_close(found, expected, equal_nan=True)
            expected.backward()
            found.backward()
            assert given.grad is not None
            torch.distributed.all_reduce(given.grad)
            torch.testing.assert_close(given.grad / 3, whole.grad)
        row = lightning_shard.shard(torch.tensor(values), mesh_of(3), 0)
        for function in (torch.quantile, torch.nanquantile):
            q = torch.tensor([0.2, 0.9])
            expected = function(torch.tensor(values), q)
            torch.testing.assert_close(function(row, q), expected, equal_nan=True)


@pytest.mark.spmd(3)
def test_statistics_of_nothing_and_wrong_arguments():
    x = lightning_shard.shard(torch.zeros(0), mesh_of(3), 0)
    assert x.median().isnan()
    for call in (lambda: x.quantile(0.5), lambda: x.median(0), lambda: x.kthvalue(1)):
        with pytest.raises(
            (RuntimeError, IndexError), match=r"non-empty|non-zero size|out of range"
        ):
            call()
    with pytest.raises(RuntimeError, match=r"range \[0, 1\]"):
        lightning_shard.shard(torch.ones(4), mesh_of(3), 0).quantile(1.5)


@pytest.mark.spmd(3)
def test_second_derivatives_of_running_extremes_where_a_rank_has_no_rows():
    """Two columns are split in place of the rows; the third rank has none."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin().cummax(0)[0], x.cummin(0).values

    assert_double_backward(function, [(6, 2)], {0: [0]}, mesh_of(3))
