"""Products of split and plain tensors."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from tests.parity import assert_parity, mesh_of

SHAPE = (2, 3, 7, 5)


def sparse(*shape: int) -> torch.Tensor:
    """A plain sparse matrix, or several, of fixed values: every third one is 0."""
    dense = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).sin().reshape(shape)
    return dense.where(torch.arange(dense.numel()).reshape(shape) % 3 > 0, 0.0).to_sparse()


def in_rows(matrix: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is in beta state
        return matrix.to_sparse_csr()


def positive(matrix: torch.Tensor) -> torch.Tensor:
    return matrix @ matrix.mT + torch.eye(len(matrix)).to(matrix)


CASES = {
    "flat_linear": (lambda x, w, b: F.linear(x.flatten(1), w, b), [SHAPE, (4, 105), (4,)]),
    "linear": (lambda x, w, b: F.linear(x, w, b), [SHAPE, (4, 5), (4,)]),
    "linear_channels": (lambda x, w: F.linear(x.movedim(1, -1), w), [SHAPE, (4, 3)]),
    "mlp": (lambda x, w: F.conv1d(x.reshape(2, 3, -1), w).reshape(2, 4, 7, 5), [SHAPE, (4, 3, 1)]),
    "matmul": (lambda x, w: x @ w, [SHAPE, (5, 4)]),
    "matmul_left": (lambda x, w: torch.matmul(w, x), [SHAPE, (2, 3, 4, 7)]),
    "matrix_vector": (lambda x, v: (x @ v, torch.mv(x[0, 0], v)), [SHAPE, (5,)]),
    "dot": (lambda x: torch.dot(x.flatten(), x.flatten()), [SHAPE]),
    "gram": (lambda x: (x @ x.mT, x.mT @ x), [SHAPE]),
    "einsum": (lambda x, w: torch.einsum("bixy,ioxy->boxy", x, w), [SHAPE, (3, 4, 7, 5)]),
    "einsum_sum": (lambda x, w: torch.einsum("bcxy,xk->bck", x, w), [SHAPE, (7, 4)]),
    "einsum_dots": (lambda x, w: torch.einsum("...xy,ky->...kx", x, w), [SHAPE, (4, 5)]),
    "einsum_implicit": (lambda x, w: torch.einsum("bcxy, yk", x, w), [SHAPE, (5, 4)]),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2, 1], [0, 1])), [SHAPE, (7, 3, 4)]),
    "addmm": (lambda x, w, b: torch.addmm(b, x[0, 0], w, beta=2, alpha=3), [SHAPE, (5, 4), (4,)]),
    "baddbmm": (lambda x, w: torch.baddbmm(x[0], x[1], w, beta=0.5), [SHAPE, (3, 5, 5)]),
    "by_name": (
        lambda x, w: (
            torch.baddbmm(x[0], batch2=w, batch1=x[1]),
            torch.addmm(w[0, 0], mat1=x[0, 0], mat2=w[1]),
            torch.bmm(input=x[0], mat2=w) + torch.matmul(x, other=w),
        ),
        [SHAPE, (3, 5, 5)],
    ),
    "bmm": (lambda x, w: torch.bmm(x[0], w), [SHAPE, (3, 5, 4)]),
    "sparse_bmm": (
        lambda x: (
            torch.bmm(sparse(3, 4, 7), x[0]),
            torch.bmm(sparse(2, 6, 35), x.mT.flatten(2).mT),
        ),
        [SHAPE],
    ),
    "sparse_mm": (
        lambda x: (
            torch.sparse.mm(sparse(4, 7), x[0, 0]),
            torch.mm(in_rows(sparse(4, 7)), x[0, 0]),
            sparse(4, 21) @ x.flatten(1, 2)[0],
        ),
        [SHAPE],
    ),
    "inner": (lambda x, w: torch.inner(x, w), [SHAPE, (4, 5)]),
    "outer": (lambda x, w: torch.outer(x[0, 0, :, 1], w), [SHAPE, (4,)]),
    "solve": (
        lambda x, m: (
            torch.linalg.solve(positive(m), x),
            torch.linalg.solve(positive(m), x[0, 0, :, 0]),
            torch.linalg.solve_triangular(positive(m).tril(), x, upper=False),
            torch.cholesky_solve(x, torch.linalg.cholesky(positive(m)).expand(3, 7, 7)),
        ),
        [SHAPE, (7, 7)],
    ),
    "fill_diagonal_": (
        lambda x: (
            (x[0, 0] * x[0, 0]).fill_diagonal_(3.0),
            (x[0, 0].T * x[0, 1].T).fill_diagonal_(3.0),
            (2 * x[0, :2].flatten(0, 1)).fill_diagonal_(3.0, wrap=True),
        ),
        [SHAPE],
    ),
    "distances": (
        lambda x, y: [torch.cdist(x.flatten(2), y, p) for p in (0.0, 0.5, 1.0, 2.0, 3.0)],
        [SHAPE, (2, 4, 35)],
    ),
    "distances_among": (
        lambda x: torch.cdist(x, x).square() + torch.cdist(x.mT, x.mT).square().mean(),
        [SHAPE],
    ),
}
SMOOTH = [
    "distances_among",
    "solve",
    "flat_linear",
    "linear",
    "fill_diagonal_",
    "gram",
    "einsum_sum",
    "baddbmm",
]


@pytest.mark.spmd(4)
def test_fewer_rows_than_ranks():
    def function(x, w):
        return x @ w, w.T @ x.T, x.T @ x, x @ x.T

    assert_parity(function, [(3, 5), (5, 2)], {0: [0]}, mesh_of(4))
    assert_parity(function, [(5, 3), (3, 2)], {0: [1]}, mesh_of(4))
    assert_parity(function, [(5, 3), (3, 2)], {0: [1], 1: [0]}, mesh_of(4))


@pytest.mark.spmd(2)
def test_a_sparse_matrix_with_a_gradient_is_refused():
    x = lightning_shard.shard(torch.randn(7, 5, dtype=torch.float64), mesh_of(2), 0)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="sparse"):
        torch.sparse.mm(sparse(4, 7).requires_grad_(), x)
