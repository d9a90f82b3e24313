"""Masks: what they choose, where it is, and what is written there."""

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests.ops.view.test_select import numbers
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 3, 7, 5)


def weighted(rows):
    """Whose gradient tells rows apart."""
    return rows * torch.arange(1.0, len(rows) + 1, dtype=rows.dtype)


def written(x, *places_and_values):
    """A copy of `x` with some assignments."""
    y = x * 1
    for place, value in places_and_values:
        y[place] = value
    return y


def written_in_place(x, y):
    out, again = x * 1, x * 1
    out[out > 0] *= 2
    out[out < -1] += y[out < -1]
    with torch.no_grad():
        again[again > 0] = y[again > 0]
    return out * again.detach()


CASES = {
    "assigned": (lambda x, y: written(x, (x > 0, y[x > 0])), [SHAPE, SHAPE]),
    "assigned_rows": (
        lambda x, y: written(x, (x[..., 0] > 0, y[x[..., 0] > 0]), (x[..., 1] > 1, y[0, 0, 0])),
        [SHAPE, SHAPE],
    ),
    "assigned_inside": (
        lambda x, y: written(
            x,
            ((slice(None), slice(None), x[0, 0] > 0), y[:, :1, x[0, 0] > 0]),
            ((1, x[1] > 0), y[0][x[1] > 0]),
        ),
        [SHAPE, SHAPE],
    ),
    "assigned_plain": (
        lambda x: written(
            x,
            (x > 0, 2.0),
            (x < -1, torch.arange(float((x < -1).sum())).double()),
            (x > 9, torch.ones(0).double()),
            ([True, False], 1.0),
        ),
        [SHAPE],
    ),
    "assigned_through_plain": (
        lambda x, y: written(
            x,
            (torch.arange(210).reshape(SHAPE) % 3 > 0, y[torch.arange(210).reshape(SHAPE) % 3 > 0]),
        ),
        [SHAPE, SHAPE],
    ),
    "written_in_place": (written_in_place, [SHAPE, SHAPE]),
    "masked_scatter": (
        lambda x, y: (
            x.masked_scatter(x > 0, y),
            torch.masked_scatter(x, x[:1, :1] > 0, y.flatten()),
        ),
        [SHAPE, SHAPE],
    ),
    "masked_scatter_of_chosen": (
        lambda x, y: x.masked_scatter(x > 0, (x * y)[x > 0]),
        [SHAPE, SHAPE],
    ),
    "elements": (lambda x: x[x > 0], [SHAPE]),
    "leading_dims": (lambda x: x[x[..., 0] > 0] ** 2, [SHAPE]),
    "rows_of_a_dim": (lambda x: x[:, :, x[0, 0, :, 0] > 0], [SHAPE]),
    "last_dims": (lambda x: x[:, :, x[0, 0] > 0], [SHAPE]),
    "middle_dims": (lambda x: x[:, x[0, ..., 0] > 0], [SHAPE]),
    "after_a_slice": (lambda x: x[:, 1, x[0, 1] > 0], [SHAPE]),
    "plain_mask": (lambda x: x[torch.arange(210).reshape(SHAPE) % 4 > 0], [SHAPE]),
    "plain_mask_of_rows": (
        lambda x: (
            x[:, :, torch.arange(35).reshape(7, 5) % 4 > 0],
            x[:, :, [True, False] * 3 + [True]],
        ),
        [SHAPE],
    ),
    "plain_tensor": (lambda x, y: y[x > 0] * x[x > 0], [SHAPE, SHAPE]),
    "with_numbers": (lambda x: x[x[..., 0] > 0, 2], [SHAPE]),
    "with_rows": (lambda x: x.transpose(1, 2)[x[:, 0, :, 0] > 0].sin(), [SHAPE]),
    "masked_select": (
        lambda x: (x.masked_select(x > 0.3), torch.masked_select(x, x[:1, :, :, :1] > 0)),
        [SHAPE],
    ),
    "nonzero": (
        lambda x: (torch.nonzero(x > 0), (x.detach() > 1).nonzero(), x[0].argwhere()),
        [SHAPE],
    ),
    "nonzero_as_tuple": (
        lambda x: (*torch.nonzero(x > 0, as_tuple=True), *torch.where(x[1] < 0)),
        [SHAPE],
    ),
    "nothing": (lambda x: (x[x > 100], x[x > 100].sum(), torch.nonzero(x > 100)), [SHAPE]),
    "everything": (lambda x: (x[x < 100], x[x[..., 1] < 100]), [SHAPE]),
    "chained": (lambda x: x[x > 0][x[x > 0] > 0.5].exp(), [SHAPE]),
    "loss": (
        lambda x, y: F.mse_loss(x[x > 0], y[x > 0]) + F.l1_loss(x[y > 0], y[y > 0]),
        [SHAPE, SHAPE],
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(
            x.permute(0, 2, 3, 1)[x[:, 0] > 0], numbers(x[:, 1], 3)[x[:, 0] > 0]
        ),
        [SHAPE],
    ),
    "statistics": (
        lambda x: (
            x[x > 0].mean(),
            x[x > 0].std(),
            x[x > 0].amax(),
            x[x > 0].var(),
        ),
        [SHAPE],
    ),
    "layers": (
        lambda x, w: F.layer_norm(F.linear(x[x[..., 0] > 0], w), (4,)).relu(),
        [SHAPE, (4, 5)],
    ),
    "joined": (lambda x: torch.cat([x[x > 0], x[x < 0], x[x > 1]]).cumsum(0), [SHAPE]),
    "weighted": (lambda x: weighted(x[x > 0]), [SHAPE]),
}
SMOOTH = [
    "assigned",
    "masked_scatter",
    "elements",
    "leading_dims",
    "last_dims",
    "masked_select",
    "chained",
    "loss",
    "joined",
]


def random_case(seed):
    """A shape, the dims that are split, and a mask of some of the dims, with any share of trues."""
    random = torch.Generator().manual_seed(seed)

    def drawn(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    shape = [drawn(0 if seed % 5 == 0 else 1, 6) for _ in range(drawn(1, 4))]
    first = drawn(0, len(shape) - 1)
    last = drawn(first + 1, len(shape))
    share = [0.0, 0.1, 0.5, 0.9, 1.0][drawn(0, 4)]
    mask = torch.rand(shape[first:last], generator=random) < share
    dims = torch.randperm(len(shape), generator=random).tolist()
    return shape, first, mask, dims


def compare_random(seeds, mesh):
    for seed in seeds:
        shape, first, mask, dims = random_case(seed)
        if len(shape) < len(mesh):
            continue
        split = dims[: len(mesh)]
        own = [d - first for d in split if 0 <= d - first < mask.ndim]

        def choose(x, y, first=first, mask=mask, split=split, own=own, seed=seed):
            marks = mask
            if isinstance(x, DomainTensor) and seed % 2 and len(own) == len(split):
                marks = lightning_shard.shard(mask, mesh_of(*mesh), own)
            rows = x[(slice(None),) * first + (marks,)]
            plain = torch.where(torch.ones_like(x) > 0, x, y)[(slice(None),) * first + (marks,)]
            return rows * plain, rows.sum(), torch.nonzero(marks)

        try:
            assert_parity(choose, [shape, shape], {0: split}, mesh_of(*mesh))
            assert_double_backward(
                lambda x, y, choose=choose: choose(x, y)[:2],
                [shape, shape],
                {0: split},
                mesh_of(*mesh),
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {shape}, {split}, {first}, {mask}") from error


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_random_masks(mesh, run_each):
    ranks = torch.Size(mesh).numel()
    run_each(ranks, compare_random, {"": {"seeds": range(16), "mesh": mesh}})


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_many_random_masks(mesh, run_each):
    ranks = torch.Size(mesh).numel()
    run_each(ranks, compare_random, {"": {"seeds": range(16, 400), "mesh": mesh}})


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.uint8, torch.bool]
)
def test_dtypes(dtype):
    whole = (torch.randn(4, 7) * 3).to(dtype)
    mask = torch.randn(4, 7) > 0
    x, m = (lightning_shard.shard(t, mesh_of(3), 1) for t in (whole, mask))
    for found, expected in (
        (x[m], whole[mask]),
        (x[mask], whole[mask]),
        (x.masked_select(m), whole[mask]),
        (x.nonzero(), whole.nonzero()),
        (whole[m], whole[mask]),
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(lightning_shard.gather(found), expected)


@pytest.mark.spmd(4)
def test_all_rows_of_one_rank_are_shared_out():
    """A rank without a chosen row has as many of them as the others, and its gradient."""
    whole = torch.arange(16.0, requires_grad=True)
    x = lightning_shard.shard(whole, mesh_of(4), 0)
    rows = x[x < 4]
    assert isinstance(rows, DomainTensor)
    assert len(rows.to_local()) == 1
    rows.square().sum().backward()
    assert whole.grad is not None
    rank = torch.distributed.get_rank()
    assert torch.equal(whole.grad, 4 * 2 * whole.detach() * (whole < 4) * (rank == 0))


@pytest.mark.spmd(2)
def test_nothing_chosen_is_nan_as_in_torch():
    x = lightning_shard.shard(torch.randn(2, 3, 4), mesh_of(2), 2)
    t = lightning_shard.shard(torch.zeros(2, 4).long(), mesh_of(2), 1)
    none = t > 0
    assert x[x > 9].mean().isnan()
    assert x[x > 9].sum() == 0
    assert F.cross_entropy(x.transpose(1, 2)[none], t[none]).isnan()
    assert F.mse_loss(x[x > 9], x[x > 9]).isnan()


@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_wrong_masks():
    x = lightning_shard.shard(torch.randn(2, 4), mesh_of(2), 1)
    ones = lightning_shard.shard(torch.ones(2, 4, dtype=torch.uint8), mesh_of(2), 1)
    assert x[ones].shape == (8,)
    for mask in (torch.ones(2, 5).bool(), (x > 0)[:, :3], (x > 0)[:1]):
        with pytest.raises(IndexError, match="The shape of the mask"):
            x[mask]
    for value in (torch.ones(3), lightning_shard.shard(torch.ones(9, 2), mesh_of(2), 0)):
        with pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape"):
            x[torch.ones(2, 4).bool()] = value
    with pytest.raises(RuntimeError, match="dtypes match, got float32"):
        x[torch.ones(2, 4).bool()] = torch.ones(8).double()
    with pytest.raises(RuntimeError, match="Number of elements of source < number of ones"):
        x.masked_scatter(torch.ones(2, 4).bool(), torch.ones(7))
    with pytest.raises(IndexError, match="too many indices"):
        x[(x > 0)[None]]
    with pytest.raises(UnsupportedOperationError, match="of this kind"):
        x[torch.tensor(True)]
