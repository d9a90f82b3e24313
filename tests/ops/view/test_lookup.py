"""Index tensors that are split: rows are looked up, and written, where they belong."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from lightning_shard.domain.fetch_by_index import IndexedRows
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 3, 7, 5)


def index_of(x, high, *, low=0):
    """Row numbers split as `x` is."""
    return (x.detach() * 10).long().abs() % (high - low) + low


def written(x, *places_and_values):
    """A copy of `x` with some assignments."""
    y = x * 1
    for place, value in places_and_values:
        y[place] = value
    return y


def plain_table(x):
    table = torch.zeros(7, 5).to(x)
    table[index_of(x[0, 0], 7), index_of(x[1, 1], 5)] = x[0, 1]
    return table


CASES = {
    "put": (
        lambda x, y: (
            x.put(index_of(x[0], 210, low=-210), y[1], accumulate=True),
            x.put(index_of(x[0, 0], 210), torch.arange(35.0).double(), accumulate=True),
            torch.zeros(9).double().put(index_of(x, 9), y, accumulate=True),
            (x * 1).put_(torch.arange(35) * 6 - 210, y[0, 0]),
            torch.put(x, torch.arange(210) % 7, x * y),
        ),
        [SHAPE, SHAPE],
    ),
    "interleaved": (
        lambda x, y: (
            x.repeat_interleave(index_of(x[0, 0, :, 0], 4), 2),
            torch.repeat_interleave(x, index_of(x[0, 0, 0], 3), dim=-1),
            torch.repeat_interleave(y, index_of(x[0, :, 0, 0], 3), dim=1),
            x.flatten().repeat_interleave(index_of(x, 3).flatten()),
            x.repeat_interleave(torch.arange(210) % 3),
            torch.repeat_interleave(index_of(x[0, 0, :, 0], 4)),
            y.repeat_interleave(index_of(x[:1, 0, 0, 0], 4), 3),
        ),
        [SHAPE, SHAPE],
    ),
    "assigned": (
        lambda x, y: (
            written(x, ((slice(None), slice(None), index_of(x[0, 0, :, 0], 7)), y)),
            written(x, (index_of(x[0, 0, 0], 2), y[:1].expand(5, 3, 7, 5))),
            written(
                x,
                ((slice(None), 1, index_of(x[0, 0, :, 0], 7)), y[:, 2]),
                (torch.tensor([1, 0]), y),
            ),
        ),
        [SHAPE, SHAPE],
    ),
    "assigned_pairs": (
        lambda x, y: written(
            x,
            ((..., index_of(x[0, 0], 7), index_of(x[1, 0], 5)), y),
            ((index_of(x[0, 0], 2), slice(None), index_of(x[1, 0], 7)), 3.0),
        ),
        [SHAPE, SHAPE],
    ),
    "assigned_to_plain": (plain_table, [SHAPE]),
    "index_put": (
        lambda x, y: (
            x.index_put(
                (index_of(y, 2), index_of(y, 3), index_of(y, 7), index_of(y, 5)), y, accumulate=True
            ),
            x.index_put((index_of(x[0, 0, 0], 2),), y[:1], accumulate=True),
            torch.index_put(y, (index_of(x[..., 0, 0], 2),), x[:, :, None, 0, 0, None, None]),
        ),
        [SHAPE, SHAPE],
    ),
    "rows": (lambda x: x[:, :, index_of(x[0, 0], 7)], [SHAPE]),
    "negative": (lambda x: x[index_of(x, 2, low=-2)], [SHAPE]),
    "pairs": (lambda x: x[:, :, index_of(x[0, 0], 7), index_of(x[1, 0], 5)], [SHAPE]),
    "all_dims": (
        lambda x: x[index_of(x, 2), index_of(x + 1, 3), index_of(x + 2, 7), index_of(x + 3, 5)],
        [SHAPE],
    ),
    "apart": (lambda x: x[index_of(x[0, 0], 2), :, index_of(x[1, 1], 7)], [SHAPE]),
    "and_plain": (lambda x: x[:, :, index_of(x[0, 0, :, :1], 7), torch.arange(5)], [SHAPE]),
    "and_mask": (lambda x: x[x[..., 0, 0] > 0, index_of(x[0, 0], 7).max()], [SHAPE]),
    "narrow_type": (lambda x: x[:, :, index_of(x[0, 0], 7).int()], [SHAPE]),
    "plain_index": (lambda x: x[:, :, torch.arange(12).reshape(3, 4) % 7], [SHAPE]),
    "plain_table": (lambda x, y: y[:, :, index_of(x[0, 0], 7)] * 2, [SHAPE, SHAPE]),
    "of_chosen": (lambda x: x[:, :, index_of(x[0, 0][x[0, 0] > 0], 7)], [SHAPE]),
    "nothing": (lambda x: x[:, :, index_of(x[0, 0][x[0, 0] > 100], 7)].sum(), [SHAPE]),
    "of_nonzero": (lambda x: x[torch.nonzero(x > 0.5, as_tuple=True)] ** 2, [SHAPE]),
    "gather": (lambda x: (x.gather(2, index_of(x, 7)), x.gather(3, index_of(x, 5))), [SHAPE]),
    "gather_fewer": (lambda x: torch.gather(x, 2, index_of(x[:1, 1:, :4, 2:], 7)), [SHAPE]),
    "gather_plain": (lambda x: x[0, 0].gather(0, torch.arange(12).reshape(4, 3) % 7), [SHAPE]),
    "gather_table": (lambda x, y: y.gather(2, index_of(x[:1], 7)), [SHAPE, SHAPE]),
    "gather_turned": (
        lambda x: x[0, 0].gather(0, index_of(x[1, 1].T[:, :5].contiguous(), 7)),
        [(2, 3, 7, 7)],
    ),
    "take_along_dim": (
        lambda x: (x.take_along_dim(x.argsort(2), 2), x.take_along_dim(index_of(x, 200), None)),
        [SHAPE],
    ),
    "take": (
        lambda x: (x.take(index_of(x, 210)), x.take(torch.tensor([[3, -1], [9, 0]]))),
        [SHAPE],
    ),
    "take_from_plain": (lambda x, y: y.take(index_of(x, 210)), [SHAPE, SHAPE]),
    "index_select": (
        lambda x: (
            x.index_select(2, index_of(x[0, 0, :, 0], 7)),
            x.index_select(0, index_of(x[0, 0, 0], 2)),
        ),
        [SHAPE],
    ),
    "index_select_of_plain": (
        lambda x, y: y.index_select(3, index_of(x[0, 0, :, 0], 5)),
        [SHAPE, SHAPE],
    ),
    "embedding": (
        lambda x: (
            F.embedding(index_of(x, 7), x[0, 0]),
            F.embedding(index_of(x, 7), x[0, 0], padding_idx=2),
            F.embedding(torch.arange(14).reshape(2, 7) % 7, x[0, 0], padding_idx=-1),
        ),
        [SHAPE],
    ),
    "scatter_add": (
        lambda x, y: (x.scatter_add(2, index_of(x, 7), y), x.scatter_add(3, index_of(x, 5), y)),
        [SHAPE, SHAPE],
    ),
    "scatter_add_fewer": (
        lambda x, y: x.scatter_add(2, index_of(x[:1, 1:, :4, 2:], 7), y[:1, 1:, :4, 2:]),
        [SHAPE, SHAPE],
    ),
    "scatter": (lambda x: torch.zeros_like(x).scatter(2, index_of(x, 7), x * 2), [SHAPE]),
    "scatter_number": (lambda x: x.scatter(2, index_of(x, 7), 3.0), [SHAPE]),
    "scatter_plain": (
        lambda x, y: x.scatter(2, torch.arange(210).reshape(SHAPE) % 7, y),
        [SHAPE, SHAPE],
    ),
    "scatter_reduce": (
        lambda x, y: tuple(
            x.scatter_reduce(2, index_of(x, 7), y, reduce=kind, include_self=own)
            for kind in ("sum", "mean", "amax", "amin", "prod")
            for own in (True, False)
        ),
        [SHAPE, SHAPE],
    ),
    "scatter_into_plain": (
        lambda x, y: (
            torch.zeros(2, 3, 4, 5).to(x).scatter_add(2, index_of(x, 4), x),
            y.scatter_reduce(2, index_of(x, 7), x, "amax"),
        ),
        [SHAPE, SHAPE],
    ),
    "index_add": (
        lambda x, y: (
            x.index_add(2, index_of(x[0, 0, :, 0], 7), y, alpha=2),
            x.index_add(3, index_of(x[0, 0, 0], 5), y),
            x.index_add(2, torch.tensor([1, 1, 4]), y[:, :, :3]),
        ),
        [SHAPE, SHAPE],
    ),
    "index_add_into_plain": (
        lambda x, y: (
            y.index_add(2, index_of(x[0, 0, :, 0], 7), x),
            torch.zeros(4).to(x).index_add(0, index_of(x[0, 0].flatten(), 4), x[0, 0].flatten()),
        ),
        [SHAPE, SHAPE],
    ),
    "index_copy": (lambda x, y: x.index_copy(2, index_of(x[0, 0, :, 0], 7), y), [SHAPE, SHAPE]),
    "index_fill": (lambda x: x.index_fill(2, index_of(x[0, 0, :, 0], 7), 2.0), [SHAPE]),
    "in_place": (
        lambda x, y: (
            x.clone().index_add_(2, index_of(x[0, 0, :, 0], 7), y),
            x.clone().scatter_add_(2, index_of(x, 7), y),
            torch.zeros(7).to(x).index_add_(0, index_of(x[0, 0, :, 0], 7), x[1, 1, :, 0]),
        ),
        [SHAPE, SHAPE],
    ),
}
SMOOTH = [
    "put",
    "interleaved",
    "rows",
    "pairs",
    "plain_index",
    "of_nonzero",
    "gather",
    "take",
    "embedding",
    "scatter_add",
    "index_add",
]


def drawn(random, low, high):
    return int(torch.randint(low, high + 1, (), generator=random))


def compare_random(seeds, mesh, gathers):
    """Rows looked up and added by indices that are split or plain, into split or plain tensors."""
    with mock.patch.object(IndexedRows, "sends_less_whole", return_value=gathers):
        for seed in seeds:
            random = torch.Generator().manual_seed(seed)
            shape = [drawn(random, 1, 6) for _ in range(3)]
            count = drawn(random, 0 if seed % 4 == 0 else 1, 9)
            dim = drawn(random, 0, 2)
            dims = torch.randperm(3, generator=random).tolist()[: len(mesh)]
            index = torch.randint(0, shape[dim], (count, 2), generator=random)
            kinds = [drawn(random, 0, 1) for _ in range(2)]
            source = [2 * count if d == dim else n for d, n in enumerate(shape)]

            def call(x, y, dim=dim, index=index, kinds=kinds, mesh=mesh):
                i, flat = index, index.flatten()
                if isinstance(x, DomainTensor) or isinstance(y, DomainTensor):
                    own = mesh_of(*mesh)
                    two = [0] if len(mesh) == 1 else [0, 1]
                    i = lightning_shard.shard(i, own, two) if kinds[0] else i
                    flat = i.flatten() if kinds[0] else flat
                picked = x[(slice(None),) * dim + (i,)]
                added = x.index_add(dim, flat, y)
                both = torch.take_along_dim(added, index_of(x, x.shape[dim]), dim)
                return picked * 2, added, both

            split: Any = {0: dims} if kinds[1] or not kinds[0] else {1: dims}
            try:
                assert_parity(call, [shape, source], split, mesh_of(*mesh))
                assert_double_backward(
                    lambda x, y, call=call: call(x, y)[:2], [shape, source], split, mesh_of(*mesh)
                )
            except Exception as error:
                raise AssertionError(f"seed {seed}: {shape}, {dim}, {split}, {index}") from error


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_random_rows(mesh, gathers, run_each):
    ranks = torch.Size(mesh).numel()
    run_each(ranks, compare_random, {"": {"seeds": range(8), "mesh": mesh, "gathers": gathers}})


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_many_random_rows(mesh, gathers, run_each):
    ranks = torch.Size(mesh).numel()
    run_each(ranks, compare_random, {"": {"seeds": range(200), "mesh": mesh, "gathers": gathers}})


WRONG = {
    "rows": (lambda x, i: x[i], IndexError, "index 9 is out of bounds for dimension 0 with size 7"),
    "gather": (
        lambda x, i: x.gather(0, i),
        RuntimeError,
        "index 9 is out of bounds for dimension 0",
    ),
    "take": (
        lambda x, i: x.take(i),
        IndexError,
        "tried to access index 9 on a tensor of 7 elements",
    ),
    "index_select": (lambda x, i: x.index_select(0, i), IndexError, "index out of range in self"),
    "embedding": (
        lambda x, i: F.embedding(i, x[:, None]),
        IndexError,
        "index out of range in self",
    ),
    "scatter_add": (
        lambda x, i: x.scatter_add(0, i, x),
        RuntimeError,
        "index 9 is out of bounds for dimension 0",
    ),
    "index_add": (
        lambda x, i: x.index_add(0, i, x),
        RuntimeError,
        "index 9 is out of bounds for dimension 0",
    ),
    "index_add_into_plain": (
        lambda x, i: torch.zeros(7).index_add(0, i, x),
        RuntimeError,
        "index 9 is out of bounds",
    ),
    "assigned": (
        lambda x, i: x.clone().__setitem__(i, x),
        IndexError,
        "index 9 is out of bounds",
    ),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", WRONG)
def test_a_number_out_of_range_on_one_rank_ends_all(name):
    call, error, words = WRONG[name]
    x = lightning_shard.shard(torch.randn(7), mesh_of(3), 0)
    for place in (0, 6):
        index = torch.zeros(7).long()
        index[place] = 9
        with pytest.raises(error, match=words):
            call(x, lightning_shard.shard(index, mesh_of(3), 0))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.int32])
def test_dtypes(dtype):
    whole = (torch.randn(7, 4) * 3).to(dtype)
    index = torch.tensor([6, 0, 3, 3, 1, 0, 5])
    x, i = (lightning_shard.shard(t, mesh_of(3), 0) for t in (whole, index))
    for found, expected in (
        (x[i], whole[index]),
        (x.index_add(0, i, x), whole.index_add(0, index, whole)),
        (x.index_copy(0, i, x), whole.index_copy(0, index, whole)),
        (
            torch.zeros(7, 4).to(dtype).index_add_(0, i, x),
            torch.zeros(7, 4).to(dtype).index_add_(0, index, whole),
        ),
    ):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(lightning_shard.gather(found), expected)


@pytest.mark.spmd(3)
def test_the_last_of_several_writes_stays():
    """As in one process, whose loop writes one row after the other."""
    whole, index = torch.arange(14.0).reshape(7, 2), torch.tensor([6, 0, 0, 0, 1, 6, 1])
    x, i = (lightning_shard.shard(t, mesh_of(3), 0) for t in (whole, index))
    spread, many = index[:, None].expand(7, 2), i[:, None].expand(7, 2)
    expected = torch.zeros(7, 2).scatter(0, spread, whole)
    assert torch.equal(lightning_shard.gather((x * 0).scatter(0, many, x)), expected)
    assert torch.equal(torch.zeros(7, 2).scatter(0, many, x), expected)
    written_to = x * 0
    written_to[i] = x
    assert torch.equal(lightning_shard.gather(written_to), expected)


@pytest.mark.spmd(2)
def test_an_index_of_another_mesh_is_refused():
    x = lightning_shard.shard(torch.randn(7, 4), mesh_of(2), 0)
    i = lightning_shard.shard(torch.zeros(7, 4).long(), mesh_of(1, 2), [0, 1])
    plain = torch.zeros(7, 4)
    for call in (
        lambda: x[i],
        lambda: x.gather(0, i),
        lambda: x.take(i),
        lambda: x.scatter_add(0, i, x),
        lambda: plain.scatter_add(0, i, x),
        lambda: x.index_add(0, i[:, 0], x),
        lambda: x.__setitem__(i, 1.0),
    ):
        with pytest.raises(UnsupportedOperationError, match="split differently"):
            call()


@pytest.mark.spmd(3)
def test_wrong_numbers_of_repeats():
    counts = lightning_shard.shard(torch.tensor([1, 2, -1, 0]), mesh_of(3), 0)
    x = lightning_shard.shard(torch.ones(4, 2), mesh_of(3), 0)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        x.repeat_interleave(counts, 0)
    with pytest.raises(RuntimeError, match="does not match required size"):
        x.repeat_interleave(counts.abs(), 0, output_size=9)
    with pytest.raises(RuntimeError, match="same size as input"):
        x.repeat_interleave(counts, 1)


def of_nodes(x, index):
    """Messages to the nodes of a graph, as models write it, and their number."""
    total = x.new_zeros(23, 4).index_add_(0, index, x)
    again = x.new_zeros(23, 4).scatter_add_(0, index[:, None].expand_as(x), x * 2)
    count = x.new_zeros(23)
    count.scatter_add_(0, index, x.new_ones(len(x)))
    most = x.new_zeros(23, 4).scatter_reduce_(0, index[:, None].expand_as(x), x, "amax")
    return total, again, count, most, x.new_zeros(23, 4).index_add(0, index, x)


@pytest.mark.quick_rows("(2, 2)")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_a_plain_tensor_of_many_rows_becomes_split(mesh):
    index = torch.randint(0, 22, (31,), generator=torch.Generator().manual_seed(1))
    dims = [0] * len(mesh)

    def split():
        return lightning_shard.shard(index, mesh_of(*mesh), dims)

    def run(x):
        if not isinstance(x, DomainTensor):
            return of_nodes(x, index)
        found = of_nodes(x, split())
        assert all(isinstance(rows, DomainTensor) for rows in found)
        assert all(rows.to_local().shape[0] < 7 for rows in found)
        return found

    with mock.patch("lightning_shard.ops.become.LARGE", 9):
        assert_parity(run, [(31, 4)], {0: dims}, mesh_of(*mesh))
        assert_double_backward(run, [(31, 4)], {0: dims}, mesh_of(*mesh))
        buffer = torch.zeros(23, 4).index_add_(0, split(), torch.ones(31, 4))
        assert type(buffer) is torch.Tensor
    few = of_nodes(lightning_shard.shard(torch.ones(31, 4), mesh_of(*mesh), dims), split())
    assert type(few[0]) is torch.Tensor
