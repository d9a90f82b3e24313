"""Where torch gives a view, a write is seen on both sides, or refused: never lost.

Rows that come from other ranks are copies, so what is written into them does not reach the tensor
that they come from, nor the other way round.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_double_backward, mesh_of

SHAPE = (7, 3, 4)
VIEWS = {
    "slice": lambda x: x[1:5],
    "slice_of_columns": lambda x: x[:, 1:],
    "steps": lambda x: x[::2, ::2],
    "row": lambda x: x[2],
    "column": lambda x: x[:, 1],
    "number": lambda x: x[2, 1, 3],
    "select": lambda x: x.select(0, 3),
    "narrow": lambda x: x.narrow(0, 2, 3),
    "unbind": lambda x: x.unbind(0)[2],
    "chunk": lambda x: x.chunk(2, 0)[1],
    "split": lambda x: x.split(2, 1)[1],
    "tensor_split": lambda x: x.tensor_split(3, 0)[1],
    "iterate": lambda x: list(x)[4],
    "flatten_front": lambda x: x.flatten(0, 1),
    "flatten_back": lambda x: x.flatten(1, 2),
    "view_whole": lambda x: x.view(-1),
    "view_other": lambda x: x.view(3, 7, 4),
    "reshape": lambda x: x.reshape(21, 2, 2),
    "slice_of_flat": lambda x: x.flatten(0, 1)[2:9],
    "rows_of_flat": lambda x: x.flatten(0, 1)[3],
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "slice_of_transpose": lambda x: x.transpose(0, 1)[1:],
    "unsqueeze": lambda x: x.unsqueeze(1)[1:],
    "unfold": lambda x: x.unfold(0, 1, 2),
    "expand": lambda x: x.expand(1, *SHAPE)[0],
    "movedim": lambda x: x.movedim(0, -1)[..., 1:3],
    "detach": lambda x: x.detach()[2:],
    "twice": lambda x: x[1:6][2:],
    "heads": lambda x: x.unflatten(0, (7, 1))[3:, 0],
    "view_of_row": lambda x: x[2].view(-1),
    "detached_row": lambda x: x[2].detach(),
    "data_of_slice": lambda x: x[1:5].data,
    "real_of_slice": lambda x: x[1:5].real,
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze_all": lambda x: x[:1].squeeze(),
    "windows": lambda x: x.unfold(0, 6, 2),
}
COPIES = {
    "reshape_of_transpose": lambda x: x.transpose(0, 1).reshape(21, 4),
    "flatten_of_columns": lambda x: x[:, 1:].flatten(1),
    "clone": lambda x: x[1:5].clone(),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "cat": lambda x: torch.cat([x, x]),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 1)),
    "gather": lambda x: x.index_select(0, torch.tensor([3, 1, 1])),
}


def write_in_place(x: Tensor, y: Tensor) -> None:
    y.mul_(3)


def write_by_an_argument(x: Tensor, y: Tensor) -> None:
    F.hardtanh(y, 10.0, 50.0, True)


def write_one_value(x: Tensor, y: Tensor) -> None:
    y[...] = 5.0


def write_first_row(x: Tensor, y: Tensor) -> None:
    y[0] = 6.0


def write_some_rows(x: Tensor, y: Tensor) -> None:
    y[1:] += 2


def write_below(x: Tensor, y: Tensor) -> None:
    x.add_(1)


def write_a_row_below(x: Tensor, y: Tensor) -> None:
    x[3] = 9.0


def write_all_below(x: Tensor, y: Tensor) -> None:
    x[:, :2] = 4.0


def write_a_temporary(x: Tensor, y: Tensor) -> None:
    x[2:4].zero_()
    x[5].fill_(2.0)
    x[:, 0].mul_(2)


WRITES = [f for name, f in list(globals().items()) if name.startswith("write_")]


def after(view, write, x: Tensor) -> list[Tensor]:
    """Both tensors as they are used after the write."""
    y = view(x)
    if write is write_first_row and y.ndim == 0:
        y = y.view(1)
    write(x, y)
    return [lightning_shard.gather(x * 1), lightning_shard.gather(y * x.sum())]


def assert_seen_or_refused(view, write, mesh, dim: int) -> bool:
    """Whether it ran; then it gave what one process gives."""
    whole = torch.arange(84.0, dtype=torch.float64).view(SHAPE)
    x = lightning_shard.shard(whole.clone(), mesh, dim)
    try:
        expected = after(view, write, whole.clone())
    except (RuntimeError, IndexError):  # torch refuses writes of this kind
        return True
    try:
        found = after(view, write, x)
    except UnsupportedOperationError as error:
        refusal = str(error)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        return True
    assert "in place" in refusal or "write" in refusal, refusal
    return False


@pytest.mark.quick_rows(
    "0-write_all_below", "1-write_first_row", "1-write_below", "1-write_a_row_below"
)
@pytest.mark.spmd(2)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dim", [0, 1])
def test_views(write, dim):
    for name, view in VIEWS.items():
        try:
            assert_seen_or_refused(view, write, mesh_of(2), dim)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.quick_rows(
    "write_in_place", "write_first_row", "write_some_rows", "write_a_row_below", "write_a_temporary"
)
@pytest.mark.spmd(3)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_copies_are_written_freely(write):
    """But for rows of other ranks, which `y[1:] += 2` takes, adds to and assigns."""
    ran = {name: assert_seen_or_refused(f, write, mesh_of(3), 0) for name, f in COPIES.items()}
    assert all(ran.values()) or write in (write_some_rows, write_a_temporary), ran


@pytest.mark.spmd(3)
def test_a_rank_without_rows_refuses_nothing_that_others_do():
    """The clone of no rows keeps the strides of what it was a part of, which say nothing."""
    whole = torch.randn(5, 2, 4, dtype=torch.float64)
    y = lightning_shard.shard(whole, mesh_of(3), 1).clone()
    y.flatten()[::2] = 0.25
    expected = whole.clone()
    expected.flatten()[::2] = 0.25
    assert lightning_shard.gather(y).equal(expected)


@pytest.mark.spmd(3)
def test_views_on_a_rank_without_rows_are_refused_as_on_the_others():
    """One window of all rows, and the only row of a split dim."""
    for view in ("windows", "squeeze_all"):
        for write in (write_in_place, write_below):
            assert not assert_seen_or_refused(VIEWS[view], write, mesh_of(3), 0)


@pytest.mark.spmd(3)
def test_contiguous_copies_parts_of_one_row_where_it_copies_the_whole():
    whole = torch.randn(4, 3)
    for turn in (lambda x: x.T, lambda x: x[:, :2]):
        x = lightning_shard.shard(whole, mesh_of(3), 0).clone()
        turn(x).contiguous().mul_(2)
        assert lightning_shard.gather(x).equal(whole)
        x.unsqueeze(0).contiguous().mul_(2)
        assert lightning_shard.gather(x).equal(2 * whole)


@pytest.mark.spmd(3)
def test_unflatten_is_a_view_of_what_lies_transposed():
    whole = torch.arange(90.0).view(6, 5, 3)
    x = lightning_shard.shard(whole, mesh_of(3), 2).clone()
    x.transpose(0, 2).unflatten(1, (1, 5)).mul_(2)
    assert lightning_shard.gather(x).equal(2 * whole)


@pytest.mark.spmd(3)
def test_a_row_assigned_to_another_is_forgotten():
    """As of a periodic border: nobody holds the copy of the row, so nothing is stale."""
    whole = torch.arange(10.0).view(5, 2)
    x = lightning_shard.shard(whole, mesh_of(3), 0).clone()
    for field in (whole, x):
        field[0] = field[-2]
        field[-1] = field[1] * 2
    assert (lightning_shard.gather(x) * 1).equal(whole)
    held = x[1].view(-1)
    x.mul_(2)
    with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
        x + held


@pytest.mark.spmd(2)
def test_the_gradient_of_a_leaf_is_written():
    """It is a copy, for the leaf has the sum of what all ranks give."""
    whole = torch.randn(5, 2)
    x = lightning_shard.shard(whole, mesh_of(2), 0).requires_grad_()
    x.square().sum().backward()
    gradient = x.grad
    assert gradient is not None
    for copied in (gradient.detach(), gradient.data):
        with pytest.raises(UnsupportedOperationError, match="into a copy"):
            copied.clamp_(max=0.1)
    gradient.clamp_(max=0.1)
    gradient[1:] *= 2
    x.square().sum().backward()
    total = x.grad
    assert total is not None
    expected = (2 * whole).clamp(max=0.1)
    expected[1:] *= 2
    torch.testing.assert_close(lightning_shard.gather(total), expected + 2 * whole)
    with pytest.raises(UnsupportedOperationError, match="torch would show the new values"):
        gradient * 1


@pytest.mark.spmd(3)
def test_a_row_that_is_assigned_to_itself():
    """Of the two rows, the third rank has none; torch takes it, and refuses other overlaps."""
    whole = torch.randn(2, 1, 4)
    x = lightning_shard.shard(whole, mesh_of(3), 0).clone()
    x[:, 0] = x[:, -1]
    x[1] = x[-1]
    assert lightning_shard.gather(x).equal(whole)


@pytest.mark.spmd(3)
def test_the_graph_of_a_written_view_where_a_rank_has_no_rows():
    """A view is made anew after a write; of nothing, torch's `as_strided` has no second graph."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        row = y.flatten()
        row[::2] = 0.25
        return y + row.flip(0).view(y.shape)

    assert_double_backward(function, [(2, 1)], {0: [0]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_parts_of_one_row_are_copied_where_the_whole_is():
    whole = torch.randn(2, 2, dtype=torch.float64)
    y = lightning_shard.shard(whole, mesh_of(3), 0).T.clone()  # transposed in memory
    flat = y.flatten()
    flat[::2] = 0.25
    assert lightning_shard.gather(y).equal(whole.T)
    expected = whole.T.flatten()
    expected[::2] = 0.25
    assert lightning_shard.gather(flat).equal(expected)


EXPANDED = {
    "meshgrid": lambda v, w, field: torch.meshgrid(v, w, indexing="ij")[0],
    "meshgrid_other": lambda v, w, field: torch.meshgrid(v, w, indexing="ij")[1],
    "row_of_meshgrid": lambda v, w, field: torch.meshgrid(v, w, indexing="ij")[1][0],
    "broadcast": lambda v, w, field: torch.broadcast_tensors(v, field.T)[0],
    "broadcast_alike": lambda v, w, field: torch.broadcast_tensors(field[:, 0], v)[1],
    "as_other": lambda v, w, field: v[:, None].expand_as(field),
    "as_one_like_it": lambda v, w, field: v.expand_as(field[:, 0]),
    "new_dim": lambda v, w, field: v.expand(2, 3),
    "only_row": lambda v, w, field: field[:1].expand(2, 2),
}


@pytest.mark.spmd(2)
def test_an_expanded_tensor_is_written_as_in_torch_or_refused():
    """Of plain tensors beside split ones a rank would write its own rows only."""
    given = torch.arange(-1.0, 2), torch.tensor([2.0, -1.0]), torch.arange(-2.0, 4).view(3, 2)
    served: list[tuple[str, str]] = []
    for (name, view), write in itertools.product(EXPANDED.items(), (torch.neg_, torch.zero_)):
        for split in ((0,), (1,), (2,), (0, 1), (0, 2)):
            whole = [t.clone() for t in given]
            mixed = [
                lightning_shard.shard(t.clone(), mesh_of(2), 0) if i in split else t.clone()
                for i, t in enumerate(given)
            ]
            refused = [_refuses(write, view, tensors) for tensors in (whole, mixed)]
            if not refused[1]:
                assert not refused[0], (name, split)
                for found, expected in zip(mixed, whole, strict=True):
                    found = lightning_shard.gather(found) if type(found) is not Tensor else found
                    assert found.equal(expected), (name, write.__name__, split)
                served.append((name, write.__name__))
    assert ("new_dim", "zero_") in served
    assert ("as_one_like_it", "neg_") in served


def _refuses(write, view, tensors: list[Tensor]) -> bool:
    try:
        write(view(*tensors))
    except (RuntimeError, UnsupportedOperationError):
        return True
    return False


@pytest.mark.spmd(3)
def test_every_second_row_written_of_as_many_rows_as_ranks():
    """One rank has none of them; its second backward pass sends what those of the others send."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[..., ::2].mul_(3)
        return y

    assert_double_backward(function, [(3, 3)], {0: [1]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_a_boundary_that_is_added_to():
    """Of its one row two ranks have none. `+=` writes through a view, then assigns the view."""

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, :1] += y.mean()
        return y

    assert_double_backward(function, [(2, 6)], {0: [1]}, mesh_of(3))
