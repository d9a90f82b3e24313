"""Rows chosen by position, by lists and by index tensors; cut, shifted, repeated, assigned."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 3, 7, 5)
ROWS = torch.tensor([4, 0, 0, 3, -1])
INDEX = torch.tensor([0, 2, 1, 1, 0, 2, 1])[:, None].expand(2, 2, 7, 5)


def numbers(x: torch.Tensor, high: int) -> torch.Tensor:
    """Row numbers split as `x` is."""
    return (x.detach().abs() * 10).long() % high


def assign(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    y[..., 0, :] = x[..., 1, :] * 3
    y[:, :, -1] = x[:, :, -2] * 3
    return y


def assign_where(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 1] = 0.5
    y[:, :, 2:4] = 7
    y[torch.tensor([True, False])] = -1.0
    return y


CASES = {
    "slice": (lambda x: x[..., 1:-1, ::2], [SHAPE]),
    "select": (lambda x: x[:, 1, 3], [SHAPE]),
    "last": (lambda x: x[..., -1], [SHAPE]),
    "narrow": (lambda x: (x.narrow(2, 1, 4), torch.narrow_copy(x, 3, 0, 2)), [SHAPE]),
    "list": (lambda x: x[:, [2, 0, 0]], [SHAPE]),
    "tuple": (lambda x: (x[:, (2, 0)], x[:, :, (0, 6)]), [SHAPE]),
    "range": (lambda x: (x[range(2)], x[..., range(1, 6, 2), :]), [SHAPE]),
    "array": (lambda x: (x[:, np.int64(1)], x[:, :, np.array([3, 0])]), [SHAPE]),
    "list_rows": (lambda x: x[:, :, ROWS], [SHAPE]),
    "list_columns": (lambda x: x[..., ROWS, None], [SHAPE]),
    "mask_rows": (lambda x: x[:, :, torch.arange(7) % 3 > 0], [SHAPE]),
    "mask_channels": (lambda x: x[:, torch.tensor([True, False, True])], [SHAPE]),
    "mask_batch": (lambda x: x[torch.arange(6).reshape(2, 3) % 2 > 0], [SHAPE]),
    "pairs": (lambda x: x[torch.tensor([0, 1]), torch.tensor([[2], [0]])], [SHAPE]),
    "list_and_number": (lambda x: x[1, torch.tensor([2, 0]), 1:], [SHAPE]),
    "lists_apart": (lambda x: (x[0, :, ROWS], x[:, ROWS % 3, :, ROWS] * 2), [SHAPE]),
    "pairs_of_rows": (lambda x: x[:, :, ROWS, ROWS], [SHAPE]),
    "table_of_rows": (lambda x: x[:, :, ROWS.reshape(5, 1)], [SHAPE]),
    "index_select": (
        lambda x: (torch.index_select(x, 2, ROWS.abs()), x.index_select(1, ROWS[1:3])),
        [SHAPE],
    ),
    "table": (lambda x, t: t[numbers(x, 4)], [SHAPE, (4, 2)]),
    "embedding": (lambda x, t: F.embedding(numbers(x, 4), t, padding_idx=1), [SHAPE, (4, 2)]),
    "one_hot": (lambda x: (F.one_hot(numbers(x, 4), 4), F.one_hot(numbers(x, 4))), [SHAPE]),
    "gather": (lambda x: x.gather(1, numbers(x[:, :2], 3)), [SHAPE]),
    "gather_rows": (
        lambda x: (
            torch.gather(x, 2, INDEX.repeat(1, 1, 2, 1) * 2),
            x.gather(3, INDEX.repeat(1, 1, 1, 2)),
            torch.take_along_dim((x.detach() > 0).int(), INDEX[:, :1], 3),
        ),
        [SHAPE],
    ),
    "gather_plain": (lambda x: torch.gather(x, 1, INDEX), [SHAPE]),
    "gather_table": (lambda x, t: t.gather(1, numbers(x, 6)), [SHAPE, (2, 6, 7, 5)]),
    "take": (lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), dim=1), [SHAPE]),
    "scatter": (lambda x: torch.zeros_like(x).scatter(1, INDEX, x[:, 1:]), [SHAPE]),
    "scatter_number": (lambda x: x.scatter(1, numbers(x, 3), 2.0), [SHAPE]),
    "scatter_add": (lambda x, y: x.scatter_add(1, INDEX, y), [SHAPE, (2, 2, 7, 5)]),
    "scatter_reduce": (
        lambda x, y: x.scatter_reduce(1, INDEX, y, reduce="sum"),
        [SHAPE, (2, 2, 7, 5)],
    ),
    "index_add": (
        lambda x, y: x.index_add(1, torch.tensor([2, 2]), y, alpha=2),
        [SHAPE, (2, 2, 7, 5)],
    ),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([0, 2]), 3.0), [SHAPE]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 2.0) + torch.where(x > 0, x, 1.0), [SHAPE]),
    "chunk": (lambda x: x.chunk(3, 2), [SHAPE]),
    "split": (lambda x: x.split([1, 4, 2], 2) + torch.split(x, 2, dim=3), [SHAPE]),
    "tensor_split": (
        lambda x: torch.tensor_split(x, 3, 2) + x.tensor_split((1, -1), dim=3),
        [SHAPE],
    ),
    "hsplit": (lambda x: torch.hsplit(x, 3) + x.dsplit([2, 9]) + x.vsplit(2), [SHAPE]),
    "unbind": (lambda x: (*x.unbind(2), *torch.unbind(x, 1), *x), [SHAPE]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 1), value=2.0), [SHAPE]),
    "pad_by_tensors": (lambda x: F.pad(x, (torch.tensor(1), torch.tensor(2), 3, 1)), [SHAPE]),
    "list_of_slices": (lambda x: x[[slice(None), 1, ..., slice(1, -1)]], [SHAPE]),
    "crop": (lambda x: F.pad(x, (-1, 0, 1, -2)), [SHAPE]),
    "reflect": (lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"), [SHAPE]),
    "replicate": (lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate"), [SHAPE]),
    "circular": (lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), [SHAPE]),
    "roll": (lambda x: torch.roll(x, (2, -1), (2, 3)), [SHAPE]),
    "flip": (lambda x: torch.flip(x, (2, 3)), [SHAPE]),
    "fliplr": (lambda x: x[0].fliplr() + torch.flipud(x[1]), [SHAPE]),
    "rot90": (lambda x: tuple(torch.rot90(x, k, (2, 3)) for k in range(-1, 3)), [SHAPE]),
    "diff": (lambda x: (x.diff(), torch.diff(x, n=2, dim=2), (x > 0).diff(dim=2)), [SHAPE]),
    "diff_edges": (
        lambda x, y: torch.diff(x, dim=2, prepend=y, append=x[:, :, :1]),
        [SHAPE, (2, 3, 2, 5)],
    ),
    "diagonal": (lambda x: (x.diagonal(1, 2, 3), torch.diagonal(x, -5, -1, 2)), [SHAPE]),
    "diagonal_of_pairs": (
        lambda x, y: (x.flatten(2).mT @ y.flatten(2)).diagonal(dim1=1, dim2=2),
        [SHAPE, SHAPE],
    ),
    "diagonal_of_channels": (lambda x: (x.diagonal(0, 2, 1), torch.linalg.diagonal(x)), [SHAPE]),
    "diag": (lambda x: (x[0, 0].diag(), torch.diag(x[1, 1], -3), x[:, 0, 0].diag(9)), [SHAPE]),
    "tril": (lambda x: (x.tril(), torch.triu(x, 1), x.triu(diagonal=-2)), [SHAPE]),
    "repeat": (lambda x: x.repeat(2, 1, 3, 1, 2), [SHAPE]),
    "tile": (lambda x: torch.tile(x, (2, 3)), [SHAPE]),
    "interleave": (lambda x: (x.repeat_interleave(2, 2), x.repeat_interleave(3, dim=3)), [SHAPE]),
    "interleave_each": (
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 0, 2, 1, 3, 0, 1]), 2),
        [SHAPE],
    ),
    "broadcast": (lambda x, y: torch.broadcast_tensors(x, y), [SHAPE, (3, 1, 5)]),
    "assign": (assign, [SHAPE]),
    "assign_where": (assign_where, [SHAPE]),
    "new kernel": (lambda x: F.conv_transpose1d(x[..., 0], x.new_ones(3, 1, 9)), [SHAPE]),
    "new": (lambda x: (x.new_zeros(3, 4), x.new_full((2,), 5.0), x.new_ones(1), 0 * x), [SHAPE]),
}
SMOOTH = [
    "gather_rows",
    "list_rows",
    "gather_plain",
    "scatter_add",
    "diff",
    "repeat",
    "interleave",
    "rot90",
    "tril",
    "diagonal",
    "reflect",
]


def few_rows(x):
    steps = x[:, 1:] - x[:, :-1]
    copies = steps.repeat(1, 3)[:, torch.tensor([5, 0, 2])].repeat_interleave(2, 1)
    return copies.flip(1).roll(1, 1), x.tensor_split(2, 1)[1], F.pad(x.diff(dim=1), (0, 1))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("rows", [2, 3])
def test_fewer_rows_than_ranks(rows):
    def function(x):
        return few_rows(x) if rows == 3 else (x[:, 1:].repeat(1, 3), x.diff(), x.flip(1).tril())

    assert_parity(function, [(2, rows)], {0: [1]}, mesh_of(4))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_meshgrid(indexing):
    def function(x, y):
        a, b = torch.meshgrid(x, y, indexing=indexing)
        return a * 2, b + 1

    assert_parity(function, [(7,), (3,)], {0: [0]}, mesh_of(4))
    assert_parity(function, [(7,), (3,)], {1: [0]}, mesh_of(4))


@pytest.mark.spmd(3)
def test_pieces_of_no_rows():
    empty = torch.randn(2, 0, 3)
    for split in (lambda x: x.chunk(3, 1), lambda x: x.split(2, 1), lambda x: x.split(0, 1)):
        wanted = split(empty)
        for dim in (0, 1):
            found = split(lightning_shard.shard(empty, mesh_of(3), dim))
            assert [piece.shape for piece in found] == [piece.shape for piece in wanted]


@pytest.mark.spmd(3)
def test_second_gradients_of_an_embedding_on_a_rank_without_rows():
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(numbers(x, 4), table).sin() * x[..., None]

    assert_double_backward(function, [(2, 3), (4, 2)], {0: [0]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_refusals():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(3), 2)
    with pytest.raises(UnsupportedOperationError, match="index with None"):
        x[None] = 1.0
    with pytest.raises(IndexError):
        x[:, :, torch.tensor([7])]
    with pytest.raises(UnsupportedOperationError, match="would write into a copy"):
        x.diagonal(dim1=2, dim2=3).zero_()
