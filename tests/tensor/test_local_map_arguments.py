"""`local_map` of arguments that are split differently, and of functions that write into slices."""

import pytest
import torch

from lightning_shard import UnsupportedOperationError, gather, local_map, shard
from tests.parity import assert_parity, mesh_of

add = local_map(lambda x, y: x + y)


@local_map
def double(x):
    return x.mul_(2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [6, 7])
def test_rows_of_a_flattened_dim_are_paired_with_those_of_a_plain_one(rows):
    def function(x, y):
        return add(x.flatten(1), y), add(y, x.flatten(1))

    assert_parity(function, [(2, 3, rows, 4), (2, 12 * rows)], {0: [2], 1: [1]}, mesh_of(3))


@pytest.mark.spmd(4)
def test_arguments_that_are_split_along_other_dims_are_refused():
    mesh, whole = mesh_of(2, 2), torch.randn(8, 8)
    x, y = shard(whole, mesh, [0, 1]), shard(2 * whole, mesh, [1, 0])
    with pytest.raises(ValueError, match="split differently"):
        add(x, y)
    assert torch.equal(gather(add(x, shard(gather(y), mesh, [0, 1]))), 3 * whole)
    part = mesh["domain_0"]
    with pytest.raises(ValueError, match="split differently"):
        add(shard(whole, part, 0), shard(whole, mesh["domain_1"], 0))


@pytest.mark.spmd(2)
def test_one_row_is_given_whole():
    whole, row = torch.randn(7, 3), torch.randn(1, 3)
    x, y = shard(whole, mesh_of(2), 0), shard(row, mesh_of(2), 0)
    with pytest.raises(ValueError, match="one row"):
        add(x, y)
    assert torch.equal(gather(add(x, gather(y))), whole + row)


@pytest.mark.spmd(2)
def test_shapes_that_do_not_broadcast_are_the_functions_own_matter():
    weights, points = torch.randn(1, 7), torch.randn(7, 3)
    x, y = shard(points, mesh_of(2), 0), shard(weights, mesh_of(2), 1)
    found = local_map(lambda x, y: x * y.T)(x, y)
    assert torch.equal(gather(found), points * weights.T)


@pytest.mark.spmd(3)
def test_writes_into_a_slice_reach_its_source():
    def function(x):
        h = x.sin()
        double(h[2:7])
        return h, h * h

    def slices(x):
        h = x.cos()
        kept = local_map(lambda rows: rows)(h[1:6])
        kept.mul_(3)
        local_map(lambda source, out: out.copy_(source))(h[0:4].clone(), h[3:7])
        return h

    for each in (function, slices):
        assert_parity(each, [(8, 3)], {0: [0]}, mesh_of(3))


@pytest.mark.spmd(2)
def test_writes_into_a_slice_in_inference_mode():
    whole = torch.randn(8, 3)
    with torch.inference_mode():
        x = shard(whole, mesh_of(2), 0)
        double(x[2:7])
        doubled = whole.clone()
        doubled[2:7] *= 2
        assert torch.equal(gather(x), doubled)


@pytest.mark.spmd(2)
def test_writes_into_rows_of_a_leaf_or_of_unknown_place_are_refused():
    x = shard(torch.randn(8, 3), mesh_of(2), 0).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        double(x[2:7])
    rows = shard(torch.randn(16, 3), mesh_of(2), 0)[2:9]  # one of them travels
    with pytest.raises(UnsupportedOperationError, match="write into a copy"):
        double(rows.detach())


@pytest.mark.spmd(2)
def test_writes_into_a_turned_slice_reach_its_source():
    whole = torch.randn(5, 8)
    x = shard(whole, mesh_of(2), 1)
    double(x[:, 1:6].t().reshape(5, 5))
    assert torch.equal(gather(x)[:, 1:6], 2 * whole[:, 1:6])
