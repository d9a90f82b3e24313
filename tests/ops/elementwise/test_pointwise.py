"""Elementwise functions with split, plain and broadcast operands; in place; other dtypes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 3, 7, 3)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y += x
    y.mul_(2).clamp_(max=3)
    y -= torch.arange(7.0, dtype=x.dtype)[:, None]
    y.copy_(y / 2)
    return F.relu(y, inplace=True)


CASES = {
    "relu": (F.relu, [SHAPE]),
    "gelu": (lambda x: F.gelu(x, approximate="tanh") + F.gelu(x), [SHAPE]),
    "silu": (lambda x: F.silu(x) + F.softplus(x) + F.mish(x) + F.hardtanh(x), [SHAPE]),
    "leaky": (lambda x: F.leaky_relu(x, 0.2) + F.elu(x) + F.selu(x) + F.logsigmoid(x), [SHAPE]),
    "prelu_like": (lambda x, a: torch.where(x > 0, x, a[:, None, None] * x), [SHAPE, (3,)]),
    "math": (lambda x: x.exp() + torch.sin(x) - x.abs().sqrt() + x**3 + 2**x, [SHAPE]),
    "special": (lambda x: torch.special.expit(x) + torch.erf(x) + torch.special.i0(x), [SHAPE]),
    "operators": (lambda x, y: (x + y) * 2 - x / 3 + (1 - y) / (1 + x.abs()) + -x, [SHAPE, SHAPE]),
    "broadcast": (lambda x, b: x * b + 2, [SHAPE, (1, 3, 1, 1)]),
    "broadcast_row": (lambda x, b: x * b, [SHAPE, (7, 1)]),
    "broadcast_up": (lambda x, y: x[0, 0] + y, [SHAPE, (4, 7, 3)]),
    "outer_sum": (lambda x: x[:, :, :, :1] + x[:, :, :1], [SHAPE]),
    "lerp": (
        lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=0.5),
        [SHAPE, SHAPE],
    ),
    "clamp": (lambda x, y: x.clamp(-0.5, 0.5) + torch.clamp(x, min=y), [SHAPE, SHAPE]),
    "compare": (lambda x, y: ((x > y) & ~(x < 0)).double() * x, [SHAPE, SHAPE]),
    "round": (lambda x: (x.round(decimals=1), x.floor().long() // 2, x.sign()), [SHAPE]),
    "complex": (
        lambda x, y: (torch.complex(x, y) * 1j).abs() + torch.complex(x, y).real,
        [SHAPE, SHAPE],
    ),
    "dtypes": (lambda x: (x > 0).to(x) * x + x.double().type_as(x), [SHAPE]),
    "like": (lambda x: torch.zeros_like(x) + torch.full_like(x, 3) * x, [SHAPE]),
    "nan": (lambda x: torch.nan_to_num(torch.where(x > 1, torch.nan, x), 5.0), [SHAPE]),
    "in_place": (in_place, [SHAPE]),
    "prelu": (lambda x, a: F.prelu(x, a) + F.prelu(x, a[:1]), [SHAPE, (3,)]),
    "glu": (lambda x: (F.glu(x[:, :2], 1), F.glu(x[:, :, 1:], 2), F.glu(x[..., :2])), [SHAPE]),
    "gradient": (lambda x: torch.gradient(x, spacing=0.5, dim=(2, 3)), [SHAPE]),
    "gradient_2": (
        lambda x: torch.gradient(x, spacing=[2.0, 1.0], dim=[2, -1], edge_order=2),
        [SHAPE],
    ),
    "gradient_at": (
        lambda x, t: [
            torch.gradient(x, spacing=[t.exp().cumsum(0)], dim=2, edge_order=order)[0]
            for order in (1, 2)
        ],
        [SHAPE, (7,)],
    ),
    "trapezoid": (lambda x: (torch.trapezoid(x, dx=0.5, dim=2), torch.trapz(x)), [SHAPE]),
    "trapezoid_at": (
        lambda x, t: (torch.trapezoid(x, t, dim=2), torch.cumulative_trapezoid(x, t, dim=2)),
        [SHAPE, (7,)],
    ),
    "trapezoid_on": (lambda x, t: torch.trapezoid(x, t, dim=3), [SHAPE, SHAPE]),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), [SHAPE, SHAPE, (4, 3, 3)]),
    "look_up": (
        lambda x: (
            torch.bucketize(x, torch.tensor([-1.0, 0.5]).to(x)),
            torch.bucketize(x, x[0, 0, :, 0].detach().sort().values),
            torch.bucketize(torch.tensor([0.1, 0.2]).to(x), x[0, 0, 0].detach().sort().values),
            torch.isin(x.round(), x[0].round()),
            torch.searchsorted(x[0, 0, :, 0].detach().sort().values, x, right=True),
            torch.searchsorted(x.detach().sort().values, x * 2, out_int32=True),
            torch.searchsorted(x.detach(), x * 2, sorter=x.argsort()),
            torch.searchsorted(x.detach().sort().values, torch.zeros(2, 3, 7, 2).to(x)),
            torch.searchsorted(x[0, 0, :, 0].detach().sort().values, 0.3),
        ),
        [SHAPE],
    ),
    "pairs": (lambda x: torch.view_as_real(torch.complex(x, -x) ** 2), [SHAPE]),
    "pairs_back": (lambda x: torch.view_as_complex(x[..., :2].contiguous()), [SHAPE]),
}
SMOOTH = ["glu", "gradient", "trapezoid_at", "gelu", "math", "broadcast_row", "outer_sum", "lerp"]


@pytest.mark.spmd(3)
def test_the_gradient_of_a_slope_beside_an_infinity():
    x, slope = torch.randn(2, 3, 9).double(), torch.tensor(0.25).double()
    x[0, 1, 4] = torch.inf
    found = []
    for given in (x, lightning_shard.shard(x, mesh_of(3), 2)):
        leaf = slope.clone().requires_grad_()
        result = lightning_shard.gather(F.prelu(given, leaf))
        found += torch.autograd.grad(result.clamp(max=5).sum(), leaf)
    dist.all_reduce(found[1])
    torch.testing.assert_close(found[1] / 3, found[0])


@pytest.mark.spmd(3)
def test_refusals():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(3), 2)
    for refused, reason in (
        (lambda: torch.add(x, x, out=torch.empty(SHAPE)), "out="),
        (lambda: torch.zeros(1, *SHAPE[1:]).add_(x), "in-place"),
        (lambda: x[:, :, 1:3].detach().zero_(), "into a copy"),
    ):
        with pytest.raises(UnsupportedOperationError, match=reason):
            refused()


def assert_moved(function, shapes, first, second, mesh):
    assert_parity(function, shapes, {0: first, 1: second}, mesh)
    assert_double_backward(function, shapes, {0: first, 1: second}, mesh)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_operands_split_in_different_dims():
    def function(x, y):
        return x * y + torch.where(y > 0, y, x), y[:, :1] - x, x * y[0], y[..., None] * x[..., None]

    for first, second in (([2], [3]), ([1], [2]), ([0], [3])):
        assert_moved(function, [SHAPE, SHAPE], first, second, mesh_of(4))
    for first, second in (([2, 3], [1, 3]), ([2, 1], [2, 3]), ([0, 1], [0, 2])):
        assert_moved(function, [SHAPE, SHAPE], first, second, mesh_of(2, 2))
    assert_moved(lambda x, y: x + y, [(2, 7, 7), (1, 7, 1)], [2], [1], mesh_of(4))
    assert_moved(lambda x, y: y * x.flatten(2), [SHAPE, (2, 3, 21)], [3], [1], mesh_of(4))
    assert_moved(lambda x, y: x + y.mT, [(6, 6), (6, 6)], [0], [0], mesh_of(4))


@pytest.mark.spmd(4)
def test_joined_operands_split_in_different_dims():
    def join(x, y):
        return torch.cat([x, y], 3), torch.cat([y, x], 2)

    for first, second in (([3], [2]), ([2], [1])):
        assert_moved(join, [SHAPE, SHAPE], first, second, mesh_of(4))
    assert_moved(join, [SHAPE, SHAPE], [2, 3], [2, 1], mesh_of(2, 2))
    along = (lambda x, y: torch.cat([x, y], 3), [SHAPE, SHAPE])
    assert_moved(*along, [3, 1], [2, 3], mesh_of(2, 2))
    assert_moved(lambda x, y: torch.cat([y, x], 2), [SHAPE, SHAPE], [3, 1], [2, 3], mesh_of(2, 2))


@pytest.mark.quick_rows("(3, 3)")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("other", [(3, 2), (1, 2), (2, 2), (3, 3), (1, 1), (3, 1)], ids=str)
def test_operands_split_over_exchanged_or_all_axes(other):
    """Of extents that are split unevenly: rows of one split lie across those of the other."""
    shape, mesh = (2, 5, 7, 6), mesh_of(2, 2)

    def function(x, y):
        return x * y + torch.where(y > 0, y, x), y - x[:1], torch.cat([x, y], 1), x * y[0]

    assert_moved(function, [shape, shape], [2, 3], other, mesh)
    assert_moved(function, [shape, shape], other, [2, 3], mesh)


@pytest.mark.spmd(4)
def test_a_residual_of_a_sequence():
    """As in a transformer over an image, whose tokens lie on the ranks as one dim."""

    def function(x):
        tokens = F.linear(x.flatten(2).mT.reshape(-1, 3), torch.eye(3).to(x) * 2)
        windows = (
            x.reshape(2, 3, 2, 4, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 12, 3).softmax(1)
        )
        back = windows.reshape(2, 2, 2, 4, 3, 3).permute(0, 5, 1, 3, 2, 4).reshape(2, 3, 8, 6)
        return x + tokens.reshape(2, 48, 3).mT.reshape(2, 3, 8, 6) * back

    assert_parity(function, [(2, 3, 8, 6)], {0: [2, 3]}, mesh_of(2, 2))


@pytest.mark.spmd(4)
@pytest.mark.quick_rows("(1, 0)", "(2, 1)", "(3, 4)", "(0, 3)")
@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2, 1), (0, 2), (3, 4), (4, 1), (0, 3)], ids=str)
def test_rows_of_extent_one_lie_on_other_ranks(other):
    """As in an attention over axes of extent 1: splits of such dims are moved, not refused."""
    shape = (1, 1, 1, 2, 48)
    assert_parity(
        lambda x, y: (x + y) * y + torch.where(x > 0, y, x).sum((0, 1)),
        [shape, shape],
        {0: [1, 2], 1: other},
        mesh_of(2, 2),
    )
    assert_parity(
        lambda x, y: torch.cat([x, y], 3).sum(3, keepdim=True) * x,
        [shape, shape],
        {0: other, 1: [1, 2]},
        mesh_of(2, 2),
    )


@pytest.mark.spmd(4)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 1), (1, 5), (1, 1)], ids=str)
def test_a_residual_of_fewer_tokens_than_ranks(shape):
    """Ranks that have no rows of a flattened plane raised, and the others waited for ever."""
    one = 2 + shape.index(1)

    def function(x):
        tokens, line = x.flatten(2), x.sum(one)
        return tokens + line, line * tokens.roll(1, 2), torch.cat([line, tokens], 1)

    assert_parity(function, [(2, 3, *shape)], {0: [2, 3]}, mesh_of(2, 2))


@pytest.mark.spmd(3)
def test_areas_of_integers_of_few_bits():
    x = torch.arange(28, dtype=torch.int8).view(7, 4) * 4
    split = lightning_shard.shard(x, mesh_of(3), 0)
    for dim in (0, 1):
        found = lightning_shard.gather(torch.trapezoid(split, dim=dim))
        torch.testing.assert_close(found, torch.trapezoid(x, dim=dim))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1])
def test_areas_of_no_samples(dim):
    x = torch.ones((0, 3) if dim == 0 else (3, 0))
    split = lightning_shard.shard(x, mesh_of(3), 0)
    for function in (torch.trapezoid, torch.cumulative_trapezoid):
        for d in (0, 1):
            found = lightning_shard.gather(function(split, dim=d))
            torch.testing.assert_close(found, function(x, dim=d))
        places = x.select(1 - dim, 0)
        found = lightning_shard.gather(function(split, places, dim=dim))
        torch.testing.assert_close(found, function(x, places, dim=dim))
