"""The ways out: rules of one's own, code on one part, and permission to gather."""

from contextlib import nullcontext

import pytest
import torch
import torch.utils.dlpack as dlpack

import lightning_shard
from lightning_shard import UnsupportedOperationError
from lightning_shard.tensor.gathering import gathered_functions
from tests.parity import assert_parity, mesh_of, tiles_of


@pytest.mark.spmd(3)
def test_registered_rule():
    function = torch.fake_quantize_per_tensor_affine

    @lightning_shard.register_rule(function)
    def quantize(func, x, scale, zero_point, quant_min, quant_max):
        if not isinstance(scale, float):
            raise UnsupportedOperationError("a scale that is a tensor")
        return x.like(func(x.local, scale, zero_point, quant_min, quant_max))

    try:
        assert_parity(
            lambda x: function(x, 0.1, 0, -8, 7),
            [(7, 3)],
            {0: [0]},
            mesh_of(3),
            dtype=torch.float32,
        )
        x = lightning_shard.shard(torch.randn(4, 3), mesh_of(3), 0)
        with pytest.raises(UnsupportedOperationError, match="a scale that is a tensor"):
            function(x, torch.tensor(0.1), torch.tensor(0), -8, 7)
        with pytest.raises(ValueError, match="already has the rule"):
            lightning_shard.register_rule(function)(quantize)
    finally:
        from lightning_shard.ops import registry

        registry._RULES.pop(function)


def check_a_rule_that_drops_a_row(where):
    function = torch.fake_quantize_per_tensor_affine
    x = lightning_shard.shard(torch.randn(7, 3), where, 0)
    lightning_shard.register_rule(function)(lambda func, x, *_: x.like(x.local[1:]))
    try:
        with pytest.raises(RuntimeError, match=r"a part of shape .* please report it") as refused:
            function(x, 0.1, 0, -8, 7)
        assert "where the split of (7, 3) has one of" in str(refused.value)
    finally:
        from lightning_shard.ops import registry

        registry._RULES.pop(function)


@pytest.mark.spmd(3)
def test_a_rule_that_gives_other_rows_than_it_says_is_found_on_ranks():
    check_a_rule_that_drops_a_row(mesh_of(3))


def test_a_rule_that_gives_other_rows_than_it_says_is_found_in_tiles():
    check_a_rule_that_drops_a_row(tiles_of(3))


@pytest.mark.spmd(2)
def test_a_refusal_names_the_ways_out_and_the_command_that_finds_all():
    x = lightning_shard.shard(torch.randn(4, 3), mesh_of(2), 0)
    with pytest.raises(UnsupportedOperationError) as refused:
        torch.linalg.svdvals(x)
    for way in ("register_rule", "gather", "shard", "allow_gather", "lightning_shard check"):
        assert way in str(refused.value)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


@pytest.mark.spmd(3)
def test_local_map_of_a_custom_function():
    cube = lightning_shard.local_map(Cube.apply)
    assert_parity(lambda x: cube(x) * 2, [(2, 7, 5)], {0: [1]}, mesh_of(3))
    x = lightning_shard.shard(torch.randn(2, 7), mesh_of(3), 1)
    with pytest.raises(ValueError, match="must keep the split dims"):
        lightning_shard.local_map(lambda t: t[:, :1])(x)


@pytest.mark.spmd(3)
def test_custom_function_on_the_wrapper_is_refused():
    x = lightning_shard.shard(torch.randn(2, 7).requires_grad_(), mesh_of(3), 1)
    with pytest.raises(UnsupportedOperationError, match="allow_function"):
        Cube.apply(x).sum()


@pytest.mark.spmd(3)
def test_gather_where_it_is_allowed():
    mesh = mesh_of(3)

    def function(x):
        with lightning_shard.allow_gather():
            return torch.linalg.svdvals(x).sum() * x

    gathered_functions.clear()  # it warns once in a process, and ranks run many tests
    with pytest.warns(UserWarning, match=r"svd.* 672 bytes on every rank"):
        assert_parity(function, [(2, 7, 6)], {0: [1]}, mesh)
    x = lightning_shard.shard(torch.randn(2, 7, 6), mesh, 1)
    with pytest.raises(UnsupportedOperationError, match="cannot run"):
        torch.linalg.svdvals(x)


class Scaled(torch.autograd.Function):
    """With a parameter, and a keyword, like the layer norms of image restoration nets."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean = x.mean(1, keepdim=True)
        scale = 1 / (x.var(1, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(x - mean, scale, weight)
        return weight.view(1, -1, 1) * (x - mean) * scale

    @staticmethod
    def backward(ctx, *grads):
        centred, scale, weight = ctx.saved_tensors
        return (
            grads[0] * weight.view(1, -1, 1) * scale,
            (grads[0] * centred * scale).sum((0, 2)),
            None,
        )


@pytest.mark.spmd(3)
def test_a_custom_function_is_gathered_where_it_is_allowed():
    def function(x, w):
        with lightning_shard.allow_gather():
            return Scaled.apply(x * 2, w, 1e-6) * x

    with pytest.warns(UserWarning, match=r"Scaled has no rule .* bytes on every rank"):
        assert_parity(function, [(2, 5, 7), (5,)], {0: [2]}, mesh_of(3))
    x = lightning_shard.shard(torch.randn(2, 5, 7).requires_grad_(), mesh_of(3), 2)
    with pytest.raises(UnsupportedOperationError, match="allow_function"):
        Scaled.apply(x, torch.ones(5), 1e-6).sum()  # outside it is refused again


@pytest.mark.spmd(3)
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_no_write_is_lost_where_gathering_is_allowed():
    whole = torch.rand(2, 7)
    x = lightning_shard.shard(whole.clone(), mesh_of(3), 1)
    mask = whole > 0.5
    index = torch.tensor([0, 3])
    writes = {
        "values through a mask": lambda x: x.__setitem__(mask, torch.zeros(int(mask.sum()))),
        "put_": lambda x: x.put_(index, torch.zeros(2)),
        "index_put_": lambda x: x.index_put_((index % 2, index), torch.zeros(2)),
        "masked_scatter_": lambda x: x.masked_scatter_(mask, torch.zeros(14)),
        "inplace=True": lambda x: torch.nn.functional.rrelu(x - 1, inplace=True) + x,
        "resize_": lambda x: x.resize_(3, 3),
        "data": lambda x: setattr(x, "data", torch.zeros(2, 7)),
    }
    for name, write in writes.items():
        expected = whole.clone()
        with torch.random.fork_rng():
            write(expected)
        with lightning_shard.allow_gather():
            try:
                write(x)
            except UnsupportedOperationError:
                assert torch.equal(lightning_shard.gather(x), whole), name
            else:
                assert torch.equal(lightning_shard.gather(x), expected), name
                x = lightning_shard.shard(whole.clone(), mesh_of(3), 1)


def takes_over(plain):
    def read(x):
        plain.data = x
        return plain.sum()

    return read


def of_data_of(x):
    return takes_over(torch.nn.Parameter(torch.zeros(3, 2)))(x).backward()


MEMORY = {
    "to_dlpack": torch.to_dlpack,
    "to_dlpack of the module": dlpack.to_dlpack,
    "C's to_dlpack": torch._C._to_dlpack,
    "C's versioned to_dlpack": torch._C._to_dlpack_versioned,
    "data of a plain tensor": takes_over(torch.zeros(3, 2)),
    "data of a parameter": of_data_of,
    "data_ptr": torch.Tensor.data_ptr,
    "untyped_storage": torch.Tensor.untyped_storage,
    "storage": torch.Tensor.storage,
    "a trace with a constant": lambda x: torch.jit.trace(lambda y: y + x, torch.zeros(3, 2)),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("way", MEMORY)
@pytest.mark.parametrize("allowed", [False, True])
def test_nothing_reads_the_memory_of_a_split_tensor(way, allowed):
    """It has none: whoever reads it would end by a segmentation fault."""
    x = lightning_shard.shard(torch.rand(3, 2), mesh_of(2), 0)
    asks = lightning_shard.allow_gather() if allowed else nullcontext()
    words = "no memory of its own, .* take lightning_shard.gather"
    with asks, pytest.raises(RuntimeError, match=words):
        MEMORY[way](x)
    assert torch.equal(lightning_shard.gather(x + 0), lightning_shard.gather(x))
