"""Assignment into rows of a dim that several dims were flattened to, of which one is split."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_shard
from tests.parity import assert_parity, assert_same, mesh_of

VOLUME = (2, 4, 3, 7, 5)  # samples, channels, and three spatial dims
TABLE = (105, 4)


def tokens(x):
    """(B, C, T, H, W) -> (B, T * H * W, C); ranks that split H hold rows that lie apart."""
    return x.flatten(2).transpose(1, 2)


def rotated(x, angles):
    """As diffusers' WanTransformer3DModel applies its rotary embedding."""
    x = tokens(x)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles[:, 0::2], angles[:, 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out.type_as(x)


def whole_rows(x, value):
    out = torch.zeros_like(tokens(x))
    out[:] = value
    return out * tokens(x)


def some_rows(x, value):
    out = tokens(x) * 2
    out[:, 11:97:3, 1:] = value[11:97:3, 1:]
    out[:, 5] = value[0]
    out[:, -1, 2] = 7.0
    return out


def rows_of_split_ones(x, value):
    out = torch.zeros_like(tokens(x))
    out[:, 4:60] = tokens(x)[:, 40:96]
    out[0, 80:] = tokens(x)[1, :25] * value[:25]
    return out


def rows_in_order(x, value):
    """The assigned rows are split as rows of a dim that was never flattened."""
    out = torch.zeros_like(tokens(x))
    out[:] = torch.cat([tokens(x)[:, 1:], tokens(x)[:, :1]], 1)
    return out * value


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "function", [rotated, whole_rows, some_rows, rows_of_split_ones, rows_in_order]
)
def test_values_and_gradients(function):
    assert_parity(function, [VOLUME, TABLE], {0: [3]}, mesh_of(3))


@pytest.mark.spmd(2)
def test_a_number_is_copied():
    x = lightning_shard.shard(torch.zeros(5, 2), mesh_of(2), 0)
    assert lightning_shard.gather(x.copy_(2.0)).eq(2.0).all()


@pytest.mark.spmd(4)
@pytest.mark.parametrize("function", [rotated, some_rows])
def test_two_split_dims(function):
    assert_parity(function, [VOLUME, TABLE], {0: [2, 3]}, mesh_of(2, 2))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [4, slice(3, None), slice(0, 2)], ids=str)
def test_a_rank_all_of_whose_rows_are_written_has_the_others_graph(rows):
    """Of 2, 2 and 1 rows; a second backward pass has the same collectives on all ranks."""

    def written(x: Tensor, edge: Tensor) -> Tensor:
        y = x.clone()
        y[rows] = edge
        return y

    def penalty(x: Tensor, edge: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((written(x, edge).mean() * x).sum(), x, create_graph=True)
        return (gradient * gradient).sum()

    field, edge = torch.randn(5, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    alone, mine = field.clone().requires_grad_(), field.clone().requires_grad_()
    (expected,) = torch.autograd.grad(penalty(alone, edge), alone)
    split = lightning_shard.shard(mine, mesh_of(3), 0)
    (first,) = torch.autograd.grad((written(split, edge) ** 3).sum(), split, create_graph=True)
    assert first.requires_grad
    (own,) = torch.autograd.grad(penalty(split, edge), mine)
    dist.all_reduce(own)
    assert_same(own / 3, expected)
