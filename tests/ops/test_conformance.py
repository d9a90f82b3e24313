"""Random extents, ranks, split dims and arguments; each failure prints its example on one line."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import pool
from tests.parity import assert_parity, mesh_of


def convolution(n, k, s, p, d):
    def run(x, w, b):
        return getattr(F, f"conv{n}d")(x, w, b, s, p, d)

    return run, (lambda c: [(3, c, *[k] * n), (3,)]), d * (k - 1) + 1 - 2 * p


def transposed(n, k, s, p, d):
    def run(x, w):
        return getattr(F, f"conv_transpose{n}d")(x, w, None, s, p, min(s, d) - 1, 1, d)

    return run, (lambda c: [(c, 3, *[k] * n)]), 2 * p + 1


def max_pool(n, k, s, p, d):
    def run(x):
        return getattr(F, f"max_pool{n}d")(x, k, s, min(p, k // 2), d, ceil_mode=p % 2 == 1)

    return run, (lambda c: []), d * (k - 1) + 1


def avg_pool(n, k, s, p, d):
    def run(x):
        return getattr(F, f"avg_pool{n}d")(x, k, s, min(p, k // 2), d % 2 == 1, p % 2 == 1)

    return run, (lambda c: []), k


def adaptive(n, k, s, p, d):
    return (lambda x: getattr(F, f"adaptive_avg_pool{n}d")(x, k)), (lambda c: []), 1


def interpolated(n, k, s, p, d):
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]

    def run(x):
        size = [max(extent * k // (s + 1), 1) for extent in x.shape[2:]]
        return F.interpolate(x, size, mode=mode, align_corners=d % 2 == 1)

    return run, (lambda c: []), 1


def padded(n, k, s, p, d):
    mode = ["constant", "reflect", "replicate", "circular"][s % 4]

    def run(x):
        return F.pad(x, (p, k - 1) * n, mode)

    return run, (lambda c: []), max(p, k - 1) + 1


def sliced(n, k, s, p, d):
    return (lambda x: x[..., p : max(p + 1, x.shape[-1] - d) : s] * 2), (lambda c: []), p + 1


def normalized(n, k, s, p, d):
    return (lambda x: F.group_norm(x, 2) + x.var(-1, keepdim=True)), (lambda c: []), 2


def attended(n, k, s, p, d):
    def run(x):
        tokens = x.flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=d % 2 == 1)

    return run, (lambda c: []), 1


def transformed(n, k, s, p, d):
    dims = tuple(range(2, 2 + n))

    def run(x):
        modes = torch.fft.rfftn(x, dim=dims, norm=["forward", "backward", "ortho"][s % 3])
        return torch.fft.irfftn(modes * 2, s=x.shape[2:], dim=dims)

    return run, (lambda c: []), 1


FAMILIES = {
    f.__name__: f
    for f in (
        convolution, transposed, max_pool, avg_pool, adaptive, interpolated, padded, sliced,
        normalized, attended, transformed,
    )
}  # fmt: skip


def check(family, spatial, ranks, dims, arguments, extents):
    function, weights, least = FAMILIES[family](len(extents), *arguments)
    shape = (2, 4, *(max(n, least) for n in extents))
    assert_parity(function, [shape, *weights(4)], {0: dims}, mesh_of(*ranks))


@st.composite
def examples(draw):
    n = draw(st.integers(1, 3))
    lines = [(1,), (2,), (3,), (4,)]
    ranks = draw(st.sampled_from([*lines, (2, 2)] if n > 1 else lines))
    dims = draw(st.permutations(range(2, 2 + n)))[: len(ranks)]
    small = st.integers(1, 3)
    arguments = (draw(st.integers(1, 5)), draw(small), draw(st.integers(0, 2)), draw(small))
    extents = tuple(draw(st.integers(1, {1: 40, 2: 12, 3: 6}[n])) for _ in range(n))
    return {"spatial": n, "ranks": ranks, "dims": dims, "arguments": arguments, "extents": extents}


@pytest.mark.quick_rows("max_pool", "avg_pool", "adaptive", "interpolated", "sliced")
@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(example=examples())
def test_random_arguments(family, example):
    try:
        pool.pool_of(math.prod(example["ranks"])).run(check, {"family": family, **example})
    except BaseException as error:
        line = ", ".join(f"{key}={value!r}" for key, value in example.items())
        pytest.fail(f"check({family!r}, {line})\n{error}", pytrace=False)
