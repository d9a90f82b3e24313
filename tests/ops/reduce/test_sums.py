"""Reductions, extremes with their places, order statistics and distances."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from lightning_shard.trainer.profile.traffic import counted
from tests.parity import assert_parity, mesh_of

SHAPE = (2, 3, 7, 3)


def ties(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).round()


def holes(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.detach() > 1, torch.nan)


CASES = {
    "mean": (lambda x: x.mean(), [SHAPE]),
    "mean_axis": (lambda x: torch.mean(x, axis=2, keepdims=True), [SHAPE]),
    "mean_named": (lambda x: torch.mean(input=x, dim=3), [SHAPE]),
    "sum_dim": (lambda x: x.sum((1, 2), keepdim=True), [SHAPE]),
    "nansum": (lambda x: holes(x).nansum(2), [SHAPE]),
    "nanmean": (lambda x: holes(x).nanmean((2, 3)), [SHAPE]),
    "var": (lambda x: x.var((0, 2, 3)), [SHAPE]),
    "var_mean": (lambda x: torch.var_mean(x, (2, 3), correction=0), [SHAPE]),
    "std_mean": (lambda x: torch.std_mean(x, dim=2, keepdim=True), [SHAPE]),
    "std": (lambda x: x.std(2), [SHAPE]),
    "prod": (lambda x: x.prod(), [SHAPE]),
    "prod_zero": (lambda x: (x * (torch.arange(7) != 3)[:, None]).prod(2), [SHAPE]),
    "prod_keep": (lambda x: x.prod(3, keepdim=True), [SHAPE]),
    "count": (lambda x: ties(x).count_nonzero((2, 3)), [SHAPE]),
    "all_any": (lambda x: ((x > -2).all(2), (x > 2).any(), (x > 0).any(3, keepdim=True)), [SHAPE]),
    "amax": (lambda x: x.amax((2, 3)), [SHAPE]),
    "amax_ties": (lambda x: (ties(x) + 0 * x).amax((2, 3)), [SHAPE]),
    "amin_all": (lambda x: x.amin(), [SHAPE]),
    "aminmax": (lambda x: torch.aminmax(x, dim=2), [SHAPE]),
    "max_all": (lambda x: x.max() - x.min(), [SHAPE]),
    "max_dim": (lambda x: torch.max(ties(x), 2), [SHAPE]),
    "min_dim": (lambda x: ties(x).min(dim=3, keepdim=True), [SHAPE]),
    "max_columns": (lambda x: (x - 9).max(3, keepdim=True), [SHAPE]),
    "min_columns": (lambda x: torch.min(x + 9, -1), [SHAPE]),
    "max_named": (lambda x: x.max(2).values + x.min(2).indices, [SHAPE]),
    "max_nan": (lambda x: (holes(x).max(2).indices, holes(x).argmax()), [SHAPE]),
    "max_other": (lambda x: torch.maximum(x, -x).max(torch.zeros(7, 1, dtype=x.dtype)), [SHAPE]),
    "argmax": (lambda x: (ties(x).argmax(2), ties(x).argmin(3, keepdim=True)), [SHAPE]),
    "argmax_all": (lambda x: (ties(x).argmax(), x.argmin(), x.argmax(keepdim=True)), [SHAPE]),
    "argmax_flat": (lambda x: x.flatten(1).argmax(0), [SHAPE]),
    "argmax_int": (lambda x: ties(x).long().argmax(2), [SHAPE]),
    "extremes_of_integers": (
        lambda x: (ties(x).short().amax(2), (x > 0).max(), (x > 0).amin(3), (x > 0).max(2).indices),
        [SHAPE],
    ),
    "topk": (lambda x: torch.topk(x, 2, 2), [SHAPE]),
    "topk_small": (lambda x: x.topk(3, dim=-1, largest=False), [SHAPE]),
    "topk_most": (lambda x: x.topk(6, dim=2).values, [SHAPE]),
    "sort": (lambda x: (torch.sort(x, dim=1, descending=True).values, x.argsort(1)), [SHAPE]),
    "median": (
        lambda x: (x.median(1).values, x.quantile(0.3, 1), x.kthvalue(2, 1).values),
        [SHAPE],
    ),
    "quantiles": (
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.7], dtype=x.dtype), 1, keepdim=True),
        [SHAPE],
    ),
    "norm": (lambda x: x.norm(dim=2), [SHAPE]),
    "norm_by_place": (lambda x: (torch.norm(x, 2, 2), torch.norm(x, dim=(2, 3))), [SHAPE]),
    "norm_1": (lambda x: torch.linalg.vector_norm(x, 1, (2, 3), keepdim=True), [SHAPE]),
    "norm_inf": (lambda x: x.norm(torch.inf), [SHAPE]),
    "norm_zero": (lambda x: (x * (torch.arange(3) != 1)).norm(dim=2), [SHAPE]),
    "cosine": (lambda x, y: F.cosine_similarity(x, y, dim=1), [SHAPE, SHAPE]),
    "cosine_2": (lambda x, y: F.cosine_similarity(x, y, dim=2), [SHAPE, (1, 3, 7, 1)]),
    "distance": (lambda x, y: F.pairwise_distance(x, y), [SHAPE, SHAPE]),
}
SMOOTH = [
    "mean",
    "var",
    "std",
    "prod",
    "prod_zero",
    "amax",
    "aminmax",
    "topk",
    "norm",
    "cosine_2",
    "distance",
]


@pytest.mark.spmd(4)
def test_equal_is_one_answer_for_all_ranks():
    x = torch.randn(SHAPE)
    split = lightning_shard.shard(x, mesh_of(2, 2), (2, 3))
    other = x.clone()
    other[..., 0, 0] += 1e-3
    assert torch.equal(split, split.clone())
    assert not torch.equal(split, other)
    assert split.allclose(other, atol=1e-2)
    assert not torch.allclose(split, other)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("keepdim", [True, False])
def test_the_mean_beside_a_variance_needs_no_collective(keepdim):
    split = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2), 2)
    with counted() as traffic:
        torch.var_mean(split, (2, 3), keepdim=keepdim)
    assert traffic.calls == 2


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", ["mode", "cummax"])
def test_order_over_a_split_dim_needs_another_dim(name):
    assert_parity(lambda x: getattr(x, name)(2), [SHAPE], {0: [2]}, mesh_of(3))
    split = lightning_shard.shard(torch.randn(7, 1), mesh_of(3), 0)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match=f"{name} needs all rows"):
        getattr(split, name)(0)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("shape", [(2, 7), (2, 2), (2, 0)], ids=str)
def test_distinct_values(shape):
    """They are plain and alike on every rank, also where a rank has no rows."""
    x = torch.randint(5, shape)
    for given in (x, x.double(), x > 2):
        split = lightning_shard.shard(given, mesh_of(3), 1)
        assert torch.equal(torch.unique(split), torch.unique(given))
        for found, wanted in zip(
            split.unique(return_counts=True), given.unique(return_counts=True), strict=True
        ):
            assert type(found) is torch.Tensor
            assert torch.equal(found, wanted)
        places = torch.unique(split, return_inverse=True)[1]
        assert places.to_local().shape == split.to_local().shape
        assert torch.equal(
            lightning_shard.gather(places), torch.unique(given, return_inverse=True)[1]
        )


@pytest.mark.spmd(3)
def test_places_of_nan_are_in_order():
    given = torch.tensor([[float("nan"), 1, 0, float("nan")], [1, float("nan"), 2, 1]])
    split = lightning_shard.shard(given, mesh_of(3), 1)
    values, places = torch.unique(split, return_inverse=True)
    assert values.isnan().sum() == 3
    assert torch.equal(lightning_shard.gather(places), torch.tensor([[3, 1, 0, 4], [1, 5, 2, 1]]))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("shape", [(8, 2), (2, 2), (0, 2), (7, 3, 1)], ids=str)
def test_distinct_slices(shape):
    whole = torch.randint(2, shape)
    for given, split_dim, dim in (
        (whole, 0, 0), (whole, 1, 0), (whole.double(), 0, -len(shape)),
        (whole.transpose(0, 1), 1, 1),
    ):  # fmt: skip
        split = lightning_shard.shard(given.contiguous(), mesh_of(3), split_dim)
        expected = torch.unique(given, return_inverse=True, return_counts=True, dim=dim)
        found = torch.unique(split, return_inverse=True, return_counts=True, dim=dim)
        for own, value in zip(found, expected, strict=True):
            assert torch.equal(lightning_shard.gather(own), value)


@pytest.mark.spmd(4)
def test_distinct_slices_that_are_refused():
    x = lightning_shard.shard(torch.zeros(4, 4), mesh_of(2, 2), [0, 1])
    with pytest.raises(UnsupportedOperationError, match="split themselves"):
        x.unique(dim=0)
    x = lightning_shard.shard(torch.full((4, 4), float("nan")), mesh_of(4), 0)
    with pytest.raises(UnsupportedOperationError, match="with NaN"):
        x.unique(dim=0)
    x = lightning_shard.shard(torch.zeros(4, 0), mesh_of(4), 0)
    with pytest.raises(RuntimeError, match="0 sized dimensions"):
        x.unique(dim=0)


@pytest.mark.spmd(3)
def test_variance_of_what_lies_far_from_zero():
    """In float32 the mean of a million is off by more than the distances of some values from it."""
    x = torch.randn(2, 3, 50, dtype=torch.float64).add(1e6).float()
    for dim in (0, 2):
        split = lightning_shard.shard(x, mesh_of(3), dim)
        for function in (torch.var, torch.std):
            for dims in ((0, 2), (0, 1, 2)):  # of all dims torch's own is off by a hundredth
                found = lightning_shard.gather(function(split, dims))
                wanted = function(x.double(), dims).float()
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert_parity(lambda x: x.var(1), [(3, 4)], {0: [1]}, mesh_of(3), make=_complex)


def _complex(shape):
    return torch.randn(shape, dtype=torch.complex128)


@pytest.mark.spmd(2)
def test_what_is_true_of_bytes_is_a_byte():
    x = torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8)
    split = lightning_shard.shard(x, mesh_of(2), 0)
    for function in (torch.any, torch.all):
        for dims in ((), (0,), (1,)):
            found, wanted = function(split, *dims), function(x, *dims)
            assert found.dtype == wanted.dtype
            assert lightning_shard.gather(found).equal(wanted)


@pytest.mark.spmd(4)
def test_an_extreme_with_ties_is_one_of_the_elements():
    """Programs look for it with `x == x.max()`; the mean of equal numbers may be rounded."""
    for number in (0.1, 0.7, 1.3e308, float("inf")):
        x = torch.tensor([number] * 5 + [-number] * 6, dtype=torch.float64)
        split = lightning_shard.shard(x, mesh_of(4), 0)
        assert split.max() == number
        assert split.min() == -number
        assert torch.equal(lightning_shard.gather(split == split.max()), x == x.max())


OF_NAN = {"amax": torch.amax, "amin": torch.amin, "max": torch.max, "inf": torch.linalg.vector_norm}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("place", [0, 4], ids=["on the first rank", "on the last"])
@pytest.mark.parametrize("name", OF_NAN)
def test_an_extreme_that_is_nan(name, place):
    """As in torch: all gradients of `amax` are NaN, and those of NaN share that of `max`."""
    options = {"ord": torch.inf} if name == "inf" else {}
    found = []
    for split in (False, True):
        x = torch.tensor([1.0, 4, 3.0, -4, 2.0], dtype=torch.float64)
        x[place] = torch.nan
        x = (lightning_shard.shard(x, mesh_of(2), 0) if split else x).requires_grad_()
        value = OF_NAN[name](x, **options)
        assert value.isnan()
        assert OF_NAN[name](x.detach(), **options).isnan()
        value.backward()
        found.append(lightning_shard.gather(x.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("function", [torch.var, torch.std])
@pytest.mark.parametrize("values", ["equal", "one at the mean"])
def test_second_derivatives_of_a_variance_where_values_are_the_mean(function, values):
    x = torch.full((7,), 3.0, dtype=torch.float64)
    if values != "equal":
        x[0], x[6] = 1.0, 5.0
    found = []
    for split in (False, True):
        leaf = (lightning_shard.shard(x, mesh_of(3), 0) if split else x.clone()).requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        places = torch.arange(7.0, dtype=torch.float64)
        (second,) = torch.autograd.grad((first * places).sum(), leaf)
        found += map(lightning_shard.gather, (first.detach(), second))
    for mine, wanted in zip(found[2:], found[:2], strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_second_derivatives_of_a_norm_where_values_are_zero(dtype):
    """As of masked fields in a penalty on gradients."""
    x = torch.randn(7, dtype=dtype)
    x[2], x[4:] = 0, 0
    found = []
    for split in (False, True):
        leaf = (lightning_shard.shard(x, mesh_of(3), 0) if split else x.clone()).requires_grad_()
        (first,) = torch.autograd.grad(leaf.norm(), leaf, create_graph=True)
        places = torch.arange(1.0, 8.0, dtype=torch.float64)
        (second,) = torch.autograd.grad((first * places).sum().real, leaf)
        found.append(lightning_shard.gather(second))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.spmd(2)
@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, torch.inf, -torch.inf])
def test_norms_of_whole_rows_beside_nan_and_fill_values(order):
    """Each is torch's own, in its precision; NaN has the gradient of its row's largest value."""
    x = torch.tensor([[1, 4, torch.nan, -4, 2], [1, 2, 3, 4, 5], [0] * 5, [1e20, 1, 1, 1, 1]])
    found = []
    for split in (False, True):
        leaf = (lightning_shard.shard(x, mesh_of(2), 0) if split else x.clone()).requires_grad_()
        norms = torch.linalg.vector_norm(leaf, order, -1)
        (gradient,) = torch.autograd.grad(norms.sum(), leaf) if order else (leaf,)
        found += map(lightning_shard.gather, (norms.detach(), gradient.detach()))
    for mine, wanted in zip(found[2:], found[:2], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.spmd(3)
def test_a_product_has_the_dtype_that_was_asked_for():
    x = torch.arange(1, 22, dtype=torch.int8).view(7, 3)
    split = lightning_shard.shard(x, mesh_of(3), 0)
    for dtype in (None, torch.int8, torch.int32, torch.float16):
        for dims in ((), (0,), (1,)):
            found = lightning_shard.gather(torch.prod(split, *dims, dtype=dtype))
            torch.testing.assert_close(found, torch.prod(x, *dims, dtype=dtype))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("pick", [torch.max, torch.min])
def test_nothing_has_no_extreme(pick):
    split = lightning_shard.shard(torch.randn(5), mesh_of(2), 0)
    with pytest.raises(RuntimeError, match="Expected reduction dim"):
        pick(split[split > 100])
