"""Slices of a split dim that are written as those of staggered grids are: `div[..., 1:] -= flux`.

The rows of a slice lie on other ranks than those of the whole, so they are copied, changed and
written back. Values and gradients are those of one process; a copy that is old is refused.
"""

import pytest
import torch
from torch import Tensor

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_parity, mesh_of


def divergence(u: Tensor, p: Tensor) -> Tensor:
    u, flux = u * 1, p.sin()
    u[1:] += flux[:-1]
    u[:-1] -= flux[1:]
    return u * u


def pressure(u: Tensor, p: Tensor) -> Tensor:
    u = u.clone()
    u[..., 1:] -= 0.1 * (p[..., 1:] - p[..., :-1])
    return u * u


def diffusion(u: Tensor, p: Tensor) -> Tensor:
    u = u * 1
    u[1:-1] = u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    u[1:-1] += p[2:] * p[:-2]
    return u * p


def colours(u: Tensor, p: Tensor) -> Tensor:
    u = u * 1
    u[::2] *= 2
    u[1::2, ::2] *= p[1::2, ::2].cos()
    u[..., 1::2] /= 1 + p[..., 1::2] ** 2
    return u * u


def in_place(u: Tensor, p: Tensor) -> Tensor:
    u = u * 1
    u[1:].add_(p[1:], alpha=2)
    u[:1].mul_(3).clamp_(max=2)
    u[-1:].copy_(p[:1])
    u.narrow(0, 1, 2).masked_fill_(p[1:3] > 0, 0.5)
    return u * u


def boundary(u: Tensor, p: Tensor) -> Tensor:
    u = u * 1
    u[0] = 0
    u[-1] = u[-2].clone()
    u[0] += 1
    u[1] -= p[1]
    u[:, 0] -= p[:, -1]
    u[0, 1] -= p[1, 1]
    u[1:, 0] *= 3
    u[1][1] += 2
    return u * u


def view_of_view(u: Tensor, p: Tensor) -> Tensor:
    u = u * 1
    inner = u[1:]
    inner[1:] *= p[2:]
    inner += 1
    turned = inner.T
    turned *= 2
    return u * inner.sum() + turned.sum() * u.mean()


CASES = [divergence, pressure, diffusion, colours, in_place, boundary, view_of_view]


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_values_and_gradients():
    for function in CASES:
        for rows in (4, 7, 13):
            for dim in (0, 1):
                shapes = [(rows, 5), (rows, 5)]
                assert_parity(function, shapes, {0: [dim], 1: [dim]}, mesh_of(3))
                if function is not boundary:  # where a row that is whole would be split
                    assert_parity(function, shapes, {0: [dim], 1: [1 - dim]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_more_ranks_than_rows():
    for function in (divergence, pressure, colours, view_of_view):
        assert_parity(function, [(2, 3), (2, 3)], {0: [0], 1: [0]}, mesh_of(3))


@pytest.mark.spmd(4)
def test_two_split_dims():
    for function in CASES:
        assert_parity(function, [(5, 3), (5, 3)], {0: [0, 1], 1: [0, 1]}, mesh_of(2, 2))


@pytest.mark.spmd(3)
def test_numbers_of_every_kind():
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.float16, torch.complex64):
        field = torch.arange(14).view(7, 2).to(dtype)
        x = lightning_shard.shard(field, mesh_of(3), 0)
        for each in (field, x):
            each[2:] += each[:5].clone()
            each[0] *= 3
        assert lightning_shard.gather(x).equal(field)
    marks = torch.arange(7) > 3
    x = lightning_shard.shard(marks, mesh_of(3), 0)
    for each in (marks, x):
        each[1:] ^= each[:-1].clone()
        each[:2].logical_not_()
    assert lightning_shard.gather(x).equal(marks)


@pytest.mark.spmd(3)
def test_another_view_of_what_was_written_is_refused():
    x = lightning_shard.shard(torch.randn(7, 2), mesh_of(3), 0).clone()
    held, turned = x[2:], x[3:].reshape(-1)
    x[1:] += 1
    for old in (held, turned):
        with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
            old * 1
    row = x[3]
    x[1:].mul_(2)
    with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
        x + row


@pytest.mark.spmd(3)
def test_several_rows_written_while_all_are_held():
    """A write into one row leaves the copies of other rows as they are, and is seen by the same."""
    field = torch.randn(7, 4)
    x = lightning_shard.shard(field, mesh_of(3), 0).clone()
    for each in (field, x):
        first, second, rows = each[0], each[1], list(each[2:5])
        first += second
        second *= 3
        first -= second
        for row in rows:
            row.mul_(2)
    assert (lightning_shard.gather(x) * 1).equal(field)
    held = x[0]
    x[:2].mul_(2)
    with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
        held.add_(1)


@pytest.mark.spmd(3)
def test_leaves():
    """A leaf that requires grad is written where autograd does not look, as in torch."""
    field = torch.randn(7, 2, dtype=torch.float64)
    x = lightning_shard.shard(field, mesh_of(3), 0).requires_grad_()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        x[1:] += 1
    assert lightning_shard.gather(x.detach()).equal(field)
    with torch.no_grad():
        x[1:] -= 0.5
        x[0] *= 2
    x.data[2:] *= 3
    field[1:] -= 0.5
    field[0] *= 2
    field[2:] *= 3
    assert lightning_shard.gather(x.detach()).equal(field)
    assert x.requires_grad
    assert x.is_leaf
    (x**2).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(lightning_shard.gather(x.grad), 2 * field)


@pytest.mark.spmd(3)
def test_inference_mode():
    """Where torch does not count what is written."""
    with torch.inference_mode():
        field = torch.randn(7, 2)
        x = lightning_shard.shard(field, mesh_of(3), 0)
        for each in (field, x):
            each[1:] += 1
            each[0] *= 2
            each[2].fill_(7)
            each[3:].mul_(each[:4].cos())
        assert lightning_shard.gather(x).equal(field)
        held = x[2:]
        x.add_(1)
        with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
            held * 1


@pytest.mark.spmd(3)
def test_out():
    field = torch.randn(7, 2)
    x = lightning_shard.shard(field, mesh_of(3), 0)
    for each in (field, x):
        torch.mul(each[:5].clone(), 2, out=each[2:])
        torch.add(each[0], 1, out=each[1])
    assert lightning_shard.gather(x).equal(field)
