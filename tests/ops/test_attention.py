"""Attention: split sequences, heads and batches; modules; and attention written out with matmul."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from tests.parity import assert_double_backward, assert_parity, assert_parity_of_module, mesh_of

Q, K = (2, 4, 7, 6), (2, 4, 5, 6)
SDPA = F.scaled_dot_product_attention
PLACES = torch.arange(7)[:, None] + torch.arange(5)


def relative(q, k, v, table):
    """As in T5: no scale, a learned bias by relative position, of shape (1, heads, q, k)."""
    buckets = (torch.arange(7)[:, None] - torch.arange(7)).clamp(-2, 2) + 2
    bias = F.embedding(buckets, table).permute(2, 0, 1)[None]
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = (
        F.softmax(scores.float(), dim=-1).type_as(scores)
        if scores.dtype == torch.half
        else scores.softmax(-1)
    )
    return torch.matmul(weights, v).transpose(1, 2).contiguous().view(2, -1, 24)


CASES = {
    "self": (SDPA, [Q, Q, Q], {0, 1, 2}),
    "cross": (SDPA, [Q, K, K], {0, 1, 2}),
    "plain_keys": (SDPA, [Q, K, K], {0}),
    "plain_queries": (SDPA, [Q, K, K], {1, 2}),
    "causal": (lambda q, k, v: SDPA(q, k, v, is_causal=True), [Q, Q, Q], {0, 1, 2}),
    "causal_cross": (
        lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=0.3),
        [Q, K, K],
        {0, 1, 2},
    ),
    "mask": (lambda q, k, v: SDPA(q, k, v, PLACES % 3 > 0), [Q, K, K], {0, 1, 2}),
    "bias": (lambda q, k, v, b: SDPA(q, k, v, b), [Q, K, K, (4, 7, 5)], {0, 1, 2}),
    "split_bias": (lambda q, k, v, b: SDPA(q, k, v, b), [Q, K, K, (2, 1, 7, 5)], {0, 1, 2, 3}),
    "wide_value": (SDPA, [Q, K, (2, 4, 5, 3)], {0, 1, 2}),
    "grouped": (
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        [Q, (2, 2, 5, 6), (2, 2, 5, 6)],
        {0, 1, 2},
    ),
    "three_dims": (SDPA, [(2, 7, 6), (2, 5, 6), (2, 5, 6)], {0, 1, 2}),
    "relative": (relative, [Q, Q, Q, (5, 4)], {0, 1, 2}),
    "softmax": (
        lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).softmax(-1), v),
        [(3, 7, 6), (3, 5, 6), (3, 5, 6)],
        {0, 1, 2},
    ),
    "gram": (lambda q: torch.einsum("bhqe,bhke->bhqk", q, q), [Q], {0}),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", CASES)
def test_three_ranks(case):
    function, shapes, split = CASES[case]
    assert_parity(function, shapes, {i: [-2] for i in split}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in ("three_dims", "softmax", "split_bias")]
)
def test_split_heads_and_sequence(case):
    function, shapes, split = CASES[case]
    dims = [-2, 0] if case == "grouped" else [1, -2]
    if case in ("grouped", "self", "cross", "relative", "gram"):
        assert_parity(function, shapes, {i: [0, -2] for i in split}, mesh_of(2, 2))
    if case != "grouped":
        assert_parity(function, shapes, dict.fromkeys(split, dims), mesh_of(2, 2))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("causal", [False, True])
def test_fewer_rows_than_ranks(causal):
    def function(q, k, v):
        return SDPA(q, k, v, is_causal=causal)

    shape = (2, 2, 3, 5)
    assert_parity(function, [shape] * 3, {0: [2], 1: [2], 2: [2]}, mesh_of(4))
    assert_parity(function, [shape] * 3, {0: [0], 1: [0], 2: [0]}, mesh_of(4))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("case", ["relative", "softmax", "gram"])
def test_double_backward(case):
    function, shapes, split = CASES[case]
    assert_double_backward(function, shapes, {i: [-2] for i in split}, mesh_of(4))


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, **options).double()

    def forward(self, x):
        return self.inner(x, x, x)


class CrossAttention(SelfAttention):
    def forward(self, x):
        return self.inner(x, x[:, 1:6].flip(1), x[:, :5], need_weights=False)[0]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first, dim):
    torch.manual_seed(0)
    module = SelfAttention(batch_first=batch_first)
    assert_parity_of_module(module, (7, 5, 8), [dim], mesh_of(3))
    assert_parity_of_module(module.eval(), (7, 5, 8), [dim], mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_multihead_cross_attention(options):
    torch.manual_seed(0)
    module = CrossAttention(batch_first=True, **options)
    if not options:
        assert_parity_of_module(module, (2, 7, 8), [1], mesh_of(3))
    else:
        assert_parity_of_module(module, (4, 7, 8), [0], mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer(norm_first, training):
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, batch_first=True, norm_first=norm_first
    ).double()
    assert_parity_of_module(module.train(training), (2, 7, 8), [1], mesh_of(4))


@pytest.mark.spmd(3)
def test_dropped_weights_and_refusals():
    q = lightning_shard.shard(torch.randn(Q), mesh_of(3), 2)
    assert SDPA(q, q, q, dropout_p=0.5).shape == Q
    torch.testing.assert_close(
        lightning_shard.gather(SDPA(q, q, torch.ones_like(q), dropout_p=1e-9)), torch.ones(Q)
    )
    split = lightning_shard.shard(torch.randn(Q), mesh_of(3), 3)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="features of query split"):
        SDPA(split, split, split)
