"""Reshapes, permutations and concatenations."""

import pytest
import torch

import lightning_shard
from tests.parity import assert_parity, mesh_of

SHAPE, TALL = (2, 3, 7, 5), (2, 3, 12, 5)


def in_place(x):
    y = x * 2
    same = y.unsqueeze_(2)
    assert same is y
    y.transpose_(1, 3).mul_(3)
    z = (x[:1] * 3).squeeze_(0).swapaxes_(0, 2)
    return y.squeeze_(2), z.swapdims_(0, 1), (x[0, 0] + 1).t_(), y.shape, y.stride()


CASES = {
    "permute": (lambda x: x.permute(0, 2, 3, 1) * 2, [SHAPE]),
    "transpose": (lambda x: (x.transpose(1, -1), x.mT, torch.swapaxes(x, 0, 2)), [SHAPE]),
    "adjoint": (lambda x: (x.adjoint(), x.mH), [SHAPE]),
    "movedim": (lambda x: x.movedim((1, 2), (-1, 0)), [SHAPE]),
    "matrix": (lambda x: (x[0, 0].t() * 1, x[0, 1].T + 0), [SHAPE]),
    "flatten": (lambda x: (x.flatten(1), x.flatten(), torch.flatten(x, 0, 2)), [SHAPE]),
    "unflatten": (lambda x: x.unflatten(2, (4, 3)), [TALL]),
    "patches": (lambda x: x.reshape(2, 3, 6, 2, 5).sum(3), [TALL]),
    "tokens": (lambda x: x.flatten(2).transpose(1, 2).reshape(2, 7, 5, 3), [SHAPE]),
    "heads": (lambda x: x.movedim(1, -1).reshape(2, -1, 1, 3).transpose(1, 2), [SHAPE]),
    "view": (lambda x: (x.view(6, 7, 5), x.view_as(x), x.reshape(-1, 7, 5)), [SHAPE]),
    "across": (lambda x: (x.reshape(2, 35, 3), x.reshape(6, 5, 7) * 2, x.reshape(15, 14)), [SHAPE]),
    "across_back": (lambda x: x.transpose(2, 3).reshape(2, 3, 7, 5).reshape(10, 21), [SHAPE]),
    "squeeze": (
        lambda x: (x[:, :1].squeeze(1), x.unsqueeze(2).squeeze(), x[:, :, :1].squeeze(2)),
        [SHAPE],
    ),
    "in_place": (in_place, [SHAPE]),
    "unsqueeze": (lambda x: (x.unsqueeze(-1), x[None], torch.unsqueeze(x, 3)), [SHAPE]),
    "expand": (lambda x: (x.expand(3, -1, -1, -1, -1), x[:, :1].expand_as(x) * 2), [SHAPE]),
    "expand_plain": (
        lambda x, g: (g.expand_as(x) * 2, x + g.expand_as(x), g.view_as(x[0, :, :1, 0])),
        [SHAPE, (3, 1, 1)],
    ),
    "expand_rows": (lambda x, g: g.expand_as(x) + 0, [SHAPE, (1, 7, 5)]),
    "expand_row": (lambda x: x[:, :, 2:3].expand(-1, -1, 4, -1) + 0, [SHAPE]),
    "broadcast_to": (lambda x: torch.broadcast_to(x[:, :, :, :1], SHAPE) + 0, [SHAPE]),
    "cat_dim1": (lambda x, g: torch.cat([x, g.expand(2, -1, -1, -1)], 1), [SHAPE, (1, 2, 7, 5)]),
    "cat_rows": (lambda x, g: torch.cat([x, g, x], 2), [SHAPE, (2, 3, 4, 5)]),
    "cat_columns": (lambda x, g: torch.concat((g, x), axis=-1), [SHAPE, (2, 3, 7, 1)]),
    "stack": (lambda x: torch.stack([x, 2 * x], 2), [SHAPE]),
    "stack_last": (lambda x, y: torch.stack((x, y), dim=-1), [SHAPE, SHAPE]),
    "atleast": (lambda x: (torch.atleast_3d(x[0, 0]), torch.atleast_2d(x[0, 0, :, 0])), [SHAPE]),
    "by_name": (
        lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])),
        [SHAPE, SHAPE],
    ),
}
SMOOTH = [
    "in_place",
    "across",
    "expand_plain",
    "patches",
    "tokens",
    "expand_row",
    "cat_rows",
    "cat_columns",
]


@pytest.mark.spmd(4)
def test_short_tensors_side_by_side():
    def function(x, y):
        return (
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.column_stack([x, y]),
            torch.dstack([x, y]),
        )

    assert_parity(function, [(3,), (3,)], {0: [0]}, mesh_of(4))


@pytest.mark.spmd(3)
def test_refusals():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(3), 2)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="another dtype"):
        x.view(torch.int32)
    with pytest.raises(RuntimeError, match="must match the existing size"):
        torch.randn(2, 3, 1, 4).expand_as(x)
    with pytest.raises(RuntimeError, match="invalid"):
        x.reshape(4, -1, 4)


def sizes_that_are_tensors(x):
    n, m = torch.tensor(6), torch.tensor(7)
    return (
        x.view(n, -1) * 2,
        x.reshape((-1, m, torch.tensor(5))),
        x.unflatten(0, (torch.tensor(2), -1)),
        x[:, :1].expand(-1, n, -1, torch.tensor(-1)),
    )


@pytest.mark.spmd(3)
def test_sizes_that_are_tensors():
    assert_parity(sizes_that_are_tensors, [SHAPE], {0: [2]}, mesh_of(3))


@pytest.mark.spmd(2)
def test_a_leaf_keeps_its_shape():
    x = lightning_shard.shard(torch.ones(4, 1), mesh_of(2), 0).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.squeeze_(1)
    with torch.no_grad():
        assert x.squeeze_(1).shape == (4,)
