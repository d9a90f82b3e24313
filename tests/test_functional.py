"""The public toolbox: values against torch on whole tensors, and <A x, y> == <x, A' y>."""

import pytest
import torch
import torch.distributed as dist

from lightning_shard import functional
from tests.parity import mesh_of

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
