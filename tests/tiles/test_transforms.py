"""torch.func and forward mode on fields in tiles give what they give in one process."""

import pytest
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import tiles_of
from tests.tensor.test_transforms import (
    FUNCTIONS,
    SHAPE,
    TRANSFORMS,
    check_jvp,
    check_mean_flow,
    check_transform,
    dual,
    made,
    mapped,
    same,
)

# of torch's own, for its first dual tensor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    check_transform(name, tiles_of(3), [2])
    check_transform(name, tiles_of(2, 2), [1, 2])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jvp_and_gradients_through_it(name):
    check_jvp(name, tiles_of(3), [2])
    if "attention" not in name:
        check_jvp(name, tiles_of(2, 2), [2, 3])


def test_gradients_of_a_mean_flow_loss():
    check_mean_flow(tiles_of(3))


def test_dual_tensors_have_no_graph():
    """The graph of tiles has no tangents: a loss of what `unpack_dual` gives would lack them."""
    x, v = made(SHAPE, SHAPE)
    for name, function in FUNCTIONS.items():
        split, slope = (lightning_shard.shard(t, tiles_of(3), 2) for t in (x, v))
        with sdpa_kernel(SDPBackend.MATH):
            same(dual(function, split, slope), dual(function, x, v))
            split.requires_grad_()
            with pytest.raises(UnsupportedOperationError, match=r"call torch\.func\.jvp instead"):
                dual(function, split, slope)
            found = jvp(function, (split,), (slope,))
            same(found, jvp(function, (x,), (v,)))
        assert found[0].requires_grad, name


def test_what_maps_over_gradients_is_refused():
    """Of sums and products alone, vmap calls what autograd calls."""
    x, weights = made(SHAPE, SHAPE[1:2])
    split = lightning_shard.shard(x.flatten(2), tiles_of(2), 2)
    served = "vmap of a scaled sum"
    for name, call in mapped(split, weights).items():
        if name == served:
            same(call(), 3 * x.flatten(2))
            continue
        with pytest.raises(UnsupportedOperationError):
            call()
    with pytest.raises(UnsupportedOperationError, match=r"torch\.stack what"):
        vmap(lambda t: t.view(-1).clone())(split)
