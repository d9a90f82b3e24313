"""Parts that a user wraps may lie otherwise on one rank, or have a graph there alone."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_shard import (
    UnsupportedOperationError,
    from_local,
    functional,
    gather,
    local_map,
    shard,
)
from tests.parity import assert_same, mesh_of

SHAPE = (2, 3, 7, 4)
FIELD = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
KERNEL = torch.linspace(-1, 1, 81, dtype=torch.float64).view(3, 3, 3, 3)
LAY = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "apart": lambda x: torch.stack([x, x], -1)[..., 0],
}


def own_rows():
    return shard(FIELD, mesh_of(3), 2).to_local()


def told(fact):
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


@pytest.mark.spmd(3)
@pytest.mark.parametrize("with_shape", [True, False])
@pytest.mark.parametrize("lay", LAY)
def test_parts_that_lie_otherwise_on_one_rank(lay, with_shape):
    """All ranks refuse a write through a view, or all write."""
    local = own_rows()
    local = LAY[lay](local) if dist.get_rank() == 1 else local
    x = from_local(local, mesh_of(3), 2, SHAPE if with_shape else None)
    assert told(x.stride())[0] == told(x.stride())[1] == told(x.stride())[2]
    assert_same(gather(F.conv2d(x, KERNEL, padding=1)), F.conv2d(FIELD, KERNEL, padding=1))
    try:
        x.flatten(1).mul_(2)
        refused = False
    except UnsupportedOperationError:
        refused = True
    assert told(refused) in ([True] * 3, [False] * 3)
    assert_same(gather(x), FIELD if refused else 2 * FIELD)
    x.mul_(3)
    assert_same(gather(x), FIELD * (3 if refused else 6))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("lay", ["channels last", "apart"])
def test_parts_that_lie_alike(lay):
    """They keep the strides of the whole tensor, as far as parts show them."""
    whole = LAY[lay](FIELD)
    x = from_local(LAY[lay](own_rows()), mesh_of(3), 2, SHAPE)
    assert x.subdomain.strides == (whole.stride() if lay == "channels last" else None)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rank", range(3))
def test_a_graph_of_one_rank(rank):
    """Backward calls the same collectives on all ranks."""
    whole = FIELD.clone().requires_grad_()
    F.conv2d(whole, KERNEL, padding=1).square().sum().backward()
    local = own_rows().requires_grad_(dist.get_rank() == rank)
    x = from_local(local, mesh_of(3), 2, SHAPE)
    assert x.requires_grad
    F.conv2d(x, KERNEL, padding=1).square().sum().backward()
    if dist.get_rank() == rank:
        low, high = ((0, 3), (3, 5), (5, 7))[rank]
        assert_same(local.grad / 3, whole.grad[:, :, low:high])
    else:
        assert local.grad is None


@pytest.mark.spmd(3)
def test_functions_of_parts_that_differ():
    local = own_rows()
    local = LAY["channels last"](local) if dist.get_rank() == 1 else local
    found = functional.gather(local, mesh_of(3), 2, SHAPE)
    assert found.is_contiguous()
    assert_same(found, FIELD)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("lay", LAY)
def test_whole_tensors_that_lie_otherwise_on_one_rank(lay):
    """As after a broadcast, into memory that lies row by row, of what one rank has turned."""
    x = shard(LAY[lay](FIELD) if dist.get_rank() == 1 else FIELD, mesh_of(3), 2)
    x.flatten(1).mul_(2)
    assert x.is_contiguous()
    assert_same(gather(x), 2 * FIELD)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("lay", LAY)
@pytest.mark.parametrize("rows", [2, 5])
def test_results_of_local_map_that_lie_otherwise(lay, rows):
    """A rank with one row, or none, cannot tell."""
    x = shard(FIELD[:, :, :rows].contiguous(), mesh_of(3), 2)
    y = local_map(lambda part: LAY[lay](part + 1))(x)
    y.flatten(1).mul_(2)
    assert_same(gather(y), 2 * (FIELD[:, :, :rows] + 1))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("fact", ["dtype", "shape", "dims"])
def test_parts_of_different_tensors_are_refused(fact):
    """Their bytes would be read as another dtype, or as rows of another place."""
    last = dist.get_rank() == 2
    local, shape, dims = own_rows().float(), SHAPE, 2
    if last and fact == "dtype":
        local = local.view(torch.int32)  # messages of as many bytes
    if last and fact == "shape":
        shape = (2, 3, 8, 4)  # the last rank has as many rows
    if last and fact == "dims":
        local, dims = torch.zeros(2, 3, 7, 1), 3
    with pytest.raises(ValueError, match="different dtypes, global shapes or dims"):
        from_local(local, mesh_of(3), dims, shape)


@pytest.mark.spmd(3)
def test_other_dims_on_one_rank_are_refused():
    with pytest.raises(ValueError, match="give the same dims on all"):
        shard(FIELD, mesh_of(3), 2 if dist.get_rank() else 3)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("function", [shard, from_local])
def test_what_is_no_plain_tensor_is_refused(function):
    split = shard(FIELD, mesh_of(3), 2)
    with pytest.raises(ValueError, match="split already, along dims"):
        function(split, mesh_of(3), 3)
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        function(FIELD.numpy(), mesh_of(3), 2)
