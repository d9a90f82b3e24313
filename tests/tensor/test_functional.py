"""The public toolbox: values against torch on whole tensors, and <A x, y> == <x, A' y>."""

import pytest
import torch
import torch.distributed as dist

import lightning_shard
from lightning_shard.tensor import functional
from tests.parity import assert_parity, mesh_of

SHAPE = (3, 7, 5)
MESHES = {"rows": ((4,), (1,)), "columns": ((4,), (2,)), "both": ((2, 2), (2, 1))}
meshes = pytest.mark.parametrize("mesh", MESHES)


def part_of(x, mesh):
    sizes, dims = MESHES[mesh]
    return functional.scatter(x, mesh_of(*sizes), dims)


def total(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def inner(x, y):
    """The real inner product."""
    return (x * y.conj()).real.sum() if x.is_complex() else (x * y).sum()


def check_adjoint(function, x, y):
    """Both sides summed over ranks: every rank's part of x and y is its own."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, y)
    torch.testing.assert_close(total(inner(function(x), y)), total(inner(x, gradient)))


TRANSFORMS = {
    "fftn": (torch.cdouble, {}),
    "ifftn": (torch.cdouble, {"norm": "ortho"}),
    "rfftn": (torch.double, {"dim": (1, 2)}),
    "irfftn": (torch.cdouble, {"dim": (1, 2), "s": (7, 8)}),
}


@pytest.mark.spmd(4)
@meshes
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name, mesh):
    dtype, options = TRANSFORMS[name]
    x = torch.randn(SHAPE, dtype=dtype)
    expected = getattr(torch.fft, name)(x, **options)
    sizes, dims = MESHES[mesh]

    def function(part):
        return getattr(functional, name)(part, mesh_of(*sizes), dims, SHAPE, **options)

    part = part_of(x, mesh)
    torch.testing.assert_close(function(part), part_of(expected, mesh))
    torch.manual_seed(dist.get_rank())
    y = torch.randn(part_of(expected, mesh).shape, dtype=expected.dtype)
    if name != "irfftn":  # it ignores the imaginary part of some modes
        check_adjoint(function, part.detach().clone(), y)


@pytest.mark.spmd(4)
@meshes
def test_gather_and_scatter(mesh):
    x = torch.randn(SHAPE, dtype=torch.double)
    sizes, dims = MESHES[mesh]

    def function(part):
        return functional.gather(part, mesh_of(*sizes), dims, SHAPE)

    torch.testing.assert_close(function(part_of(x, mesh)), x)
    torch.manual_seed(dist.get_rank())
    y = torch.randn(SHAPE, dtype=torch.double)
    check_adjoint(function, part_of(x, mesh).detach().clone(), y)
    part = part_of(x, mesh)
    check_adjoint(lambda x: part_of(x, mesh), y, torch.randn(part.shape, dtype=torch.double))


@pytest.mark.spmd(3)
def test_reduce_and_copy():
    mesh = mesh_of(3)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(2, 4, dtype=torch.double)
    torch.testing.assert_close(functional.reduce(x, mesh), total(x))
    check_adjoint(lambda x: functional.reduce(x, mesh), x, y)
    shared = torch.arange(4.0).requires_grad_()
    copied = functional.copy(shared, mesh)
    assert torch.equal(copied, shared)
    (gradient,) = torch.autograd.grad(copied, shared, y.float())
    torch.testing.assert_close(gradient, total(y.float()))


@pytest.mark.spmd(4)
def test_transpose():
    x, mesh = torch.randn(SHAPE, dtype=torch.double), mesh_of(4)

    def function(part):
        return functional.transpose(part, mesh, SHAPE, split=2, join=1)

    columns = functional.scatter(x, mesh, 2)
    torch.testing.assert_close(function(functional.scatter(x, mesh, 1)), columns)
    torch.manual_seed(dist.get_rank())
    y = torch.randn(columns.shape, dtype=torch.double)
    check_adjoint(function, functional.scatter(x, mesh, 1).clone(), y)
    with pytest.raises(ValueError, match="one axis; got 2 axes"):
        functional.transpose(x, mesh_of(2, 2), SHAPE, split=2, join=1)


SIZES = [3, 0, 5, 1]


@pytest.mark.spmd(4)
@pytest.mark.parametrize("sizes", [SIZES, None], ids=str)
def test_uneven_parts_put_together(sizes):
    mesh, rank = mesh_of(4), dist.get_rank()
    whole = torch.randn(2, sum(SIZES), dtype=torch.double)
    part = whole.split(SIZES, 1)[rank].clone()
    for function, rows in (
        (lambda x: functional.all_gather_v(x, mesh, 1, sizes), sum(SIZES)),
        (lambda x: functional.gather_v(x, mesh, -1, sizes, dst=2), sum(SIZES) if rank == 2 else 0),
    ):
        torch.testing.assert_close(function(part), whole[:, :rows])
        torch.manual_seed(rank)
        check_adjoint(function, part.clone(), torch.randn(2, rows, dtype=torch.double))
        torch.manual_seed(0)


@pytest.mark.spmd(4)
def test_uneven_parts_of_one_rank():
    mesh, rank = mesh_of(4), dist.get_rank()
    whole = torch.randn(sum(SIZES), 2, dtype=torch.double)

    def function(x):
        return functional.scatter_v(x, mesh, 0, SIZES, src=1)

    given = whole if rank == 1 else whole[:0]
    torch.testing.assert_close(function(given), whole.split(SIZES)[rank])
    torch.manual_seed(rank)
    check_adjoint(function, given.clone(), torch.randn(SIZES[rank], 2, dtype=torch.double))


@pytest.mark.spmd(4)
def test_wrong_sizes_of_parts():
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"each of the 4 ranks; got \[3, 0\]"):
        functional.all_gather_v(x, mesh_of(4), 1, [3, 0])
    with pytest.raises(ValueError, match="split dims \\(1,\\) only"):
        functional.all_gather_v(torch.randn(1 + dist.get_rank(), 3), mesh_of(4), 1)
    with pytest.raises(ValueError, match="one axis"):
        functional.gather_v(x, mesh_of(2, 2), 1)


@pytest.mark.spmd(4)
def test_from_local_takes_any_sizes():
    whole = torch.randn(2, 9, 5, dtype=torch.double)
    parts = {(4,): whole.split(SIZES, 1)}
    parts[2, 2] = [c for rows in whole.split([8, 1], 1) for c in rows.split([0, 5], 2)]
    for sizes, dims in (((4,), 1), ((2, 2), [1, 2])):
        local = parts[sizes][dist.get_rank()].clone().requires_grad_()
        x = lightning_shard.from_local(local, mesh_of(*sizes), dims)
        torch.testing.assert_close(lightning_shard.gather(x), whole)
        assert (
            x.to_local().shape
            == lightning_shard.shard(whole, mesh_of(*sizes), dims).to_local().shape
        )
        (x * x).sum().backward()
        torch.testing.assert_close(local.grad, 8 * local.detach())  # 4 ranks start backward


@pytest.mark.spmd(4)
def test_both_axes_split_one_dim():
    """As nodes of a graph on a mesh of two by two."""
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    whole = torch.arange(22.0).reshape(11, 2)
    x = lightning_shard.shard(whole, mesh, [0, -2])
    assert torch.equal(x.to_local(), whole.tensor_split(4)[rank])
    assert torch.equal(lightning_shard.gather(x), whole)
    parts = whole.split([5, 0, 2, 4])
    y = lightning_shard.from_local(parts[rank], mesh, [0, 0])
    assert torch.equal(y.to_local(), x.to_local())
    assert_parity(lambda x, y: (x @ y, x.sum(0)), [(11, 2), (2, 3)], {0: [0, 0]}, mesh)


@pytest.mark.spmd(4)
def test_from_local_refuses_what_is_no_whole():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="same place along mesh axis 0"):
        lightning_shard.from_local(torch.randn(2, 3 + rank, 5), mesh_of(2, 2), [1, 2])
    with pytest.raises(ValueError, match="leave the shape out"):
        lightning_shard.from_local(torch.randn(2, 3), mesh_of(4), 1, (2, 99))
    part = torch.randn(2, 3, dtype=torch.float64 if rank == 3 else torch.float32)
    with pytest.raises(ValueError, match="have the dtypes"):
        lightning_shard.from_local(part, mesh_of(4), 1)


@pytest.mark.spmd(4)
def test_gradients_are_as_documented():
    """The three factors that docs/engine.md states, of loss = sum over ranks of w * x."""
    mesh, rank = mesh_of(4), dist.get_rank()
    x = torch.tensor([1.0 + rank], requires_grad=True)
    w, copied = (torch.tensor([2.0], requires_grad=True) for _ in range(2))
    loss = functional.reduce(w * x, mesh) + functional.reduce(
        functional.copy(copied, mesh) * x.detach(), mesh
    )
    loss.backward()
    assert x.grad == 4 * 2
    assert total(w.grad) / 4 == 10
    assert copied.grad == 4 * 10
