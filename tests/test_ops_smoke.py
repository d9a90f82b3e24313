import pytest
import torch
import torch.nn.functional as F

from tests.parity import assert_parity, mesh_of

CASES = {
    "relu": (F.relu, [(2, 3, 7, 5)]),
    "gelu": (F.gelu, [(2, 3, 7, 5)]),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 3, 7, 5), (4, 3, 3, 3), (4,)]),
    "conv_stride": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [(2, 3, 13, 9), (4, 3, 3, 3), (4,)]),
    "conv_even": (lambda x, w: F.conv2d(x, w, None, 2, 0, 2), [(2, 3, 13, 9), (4, 3, 2, 4)]),
    "conv_same": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 13, 9), (4, 3, 2, 3)]),
    "conv_wide": (lambda x, w: F.conv2d(x, w, padding=4), [(2, 3, 5, 4), (4, 3, 7, 7)]),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), [(2, 3, 13, 9)]),
    "max_pool_ceil": (lambda x: F.max_pool2d(x, 2, ceil_mode=True), [(2, 3, 13, 9)]),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [(2, 3, 13, 9)]),
    "adaptive_1": (lambda x: F.adaptive_avg_pool2d(x, 1), [(2, 3, 13, 9)]),
    "adaptive_5": (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), [(2, 3, 13, 9)]),
    "flat_linear": (lambda x, w, b: F.linear(x.flatten(1), w, b), [(2, 3, 7, 5), (4, 105), (4,)]),
    "mlp": (
        lambda x, w: F.conv1d(x.reshape(2, 3, -1), w).reshape(2, 4, 7, 5),
        [(2, 3, 7, 5), (4, 3, 1)],
    ),
    "mean": (lambda x: x.mean(), [(2, 3, 7, 5)]),
    "sum_dim": (lambda x: x.sum((1, 2), keepdim=True), [(2, 3, 7, 5)]),
    "var": (lambda x: x.var((0, 2, 3)), [(2, 3, 7, 5)]),
    "std": (lambda x: x.std(3), [(2, 3, 7, 5)]),
    "amax": (lambda x: x.amax((2, 3)), [(2, 3, 7, 5)]),
    "norm": (lambda x: x.norm(dim=2), [(2, 3, 7, 5)]),
    "mse": (lambda x, y: F.mse_loss(x, y), [(2, 3, 7, 5), (2, 3, 7, 5)]),
    "broadcast": (lambda x, b: x * b + 2, [(2, 3, 7, 5), (1, 3, 1, 1)]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 1), value=2.0), [(2, 3, 7, 5)]),
    "crop": (lambda x: F.pad(x, (-1, 0, 1, -2)), [(2, 3, 7, 5)]),
    "reflect": (lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"), [(2, 3, 7, 5)]),
    "replicate": (lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate"), [(2, 3, 7, 5)]),
    "circular": (lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), [(2, 3, 7, 5)]),
    "roll": (lambda x: torch.roll(x, (2, -1), (2, 3)), [(2, 3, 7, 5)]),
    "flip": (lambda x: torch.flip(x, (2, 3)), [(2, 3, 7, 5)]),
    "slice": (lambda x: x[..., 1:-1, ::2], [(2, 3, 7, 5)]),
    "select": (lambda x: x[:, 1, 3], [(2, 3, 7, 5)]),
    "last": (lambda x: x[..., -1], [(2, 3, 7, 5)]),
    "cat_dim1": (
        lambda x, g: torch.cat([x, g.expand(2, -1, -1, -1)], 1),
        [(2, 3, 7, 5), (1, 2, 7, 5)],
    ),
    "cat_rows": (lambda x, g: torch.cat([x, g, x], 2), [(2, 3, 7, 5), (2, 3, 4, 5)]),
    "stack": (lambda x: torch.stack([x, 2 * x], 2), [(2, 3, 7, 5)]),
    "chunk": (lambda x: x.chunk(3, 2), [(2, 3, 7, 5)]),
    "permute": (lambda x: x.permute(0, 2, 3, 1) * 2, [(2, 3, 7, 5)]),
    "unflatten": (lambda x: x.unflatten(2, (4, 3)), [(2, 3, 12, 5)]),
    "patches": (lambda x: x.reshape(2, 3, 6, 2, 5).sum(3), [(2, 3, 12, 5)]),
    "matmul": (lambda x, w: x @ w, [(2, 3, 7, 5), (5, 4)]),
    "einsum": (lambda x, w: torch.einsum("bixy,ioxy->boxy", x, w), [(2, 3, 7, 5), (3, 4, 7, 5)]),
    "einsum_sum": (lambda x, w: torch.einsum("bcxy,xk->bck", x, w), [(2, 3, 7, 5), (7, 4)]),
}


def assign(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    y[..., 0, :] = x[..., 1, :] * 3
    y[:, :, -1] = x[:, :, -2] * 3
    return y


CASES["assign"] = (assign, [(2, 3, 7, 5)])


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_three_ranks(case, dim):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", CASES)
def test_two_by_two(case):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: [2, 3]}, mesh_of(2, 2))
