"""F.scaled_dot_product_attention by each algorithm; and attention written out with matmul."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_shard
from lightning_shard.domain.align import rows_by_owner
from lightning_shard.ops.attention import layout as attention_layout
from lightning_shard.ops.attention import ring
from lightning_shard.ops.attention import rule as attention
from lightning_shard.ops.attention.layout import Operands
from lightning_shard.trainer.profile.traffic import counted
from tests.pairs import choose
from tests.parity import assert_double_backward, assert_parity, assert_same, mesh_of

Q, K = (2, 4, 7, 6), (2, 4, 5, 6)
SDPA = F.scaled_dot_product_attention
PLACES = torch.arange(7)[:, None] + torch.arange(5)
ALGORITHMS = ("gather", "all_to_all", "ring")
MESHES = [pytest.param((ranks,), marks=pytest.mark.spmd(ranks)) for ranks in (2, 3, 4)]


@contextlib.contextmanager
def forced(algorithm: str) -> Iterator[list[str]]:
    """Use `algorithm` where it serves; yields what was used. The ring works on small tiles."""
    used = []

    def choose(operands: object, possible: dict[str, object]) -> str:
        used.append(algorithm if algorithm in possible else "gather")
        return used[-1]

    with (
        mock.patch.object(attention, "choose", choose),
        mock.patch.object(attention, "_decisions", {}),
        mock.patch.object(ring, "TILE", 40),
    ):
        yield used


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
WRITTEN_OUT = ("relative", "softmax", "gram")


@pytest.mark.parametrize(("case", "algorithm", "mesh"), choose(CASES, ALGORITHMS, MESHES))
def test_split_sequence(case, algorithm, mesh):
    function, shapes, split = CASES[case]
    with forced(algorithm) as used:
        assert_parity(function, shapes, {i: [-2] for i in split}, mesh_of(*mesh))
    assert case in WRITTEN_OUT or used == [algorithm] or case == "plain_keys"


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("case", "algorithm"),
    choose(
        [c for c in CASES if c not in ("three_dims", "softmax", "split_bias")], ALGORITHMS, every=2
    ),
)
def test_split_heads_and_sequence(case, algorithm):
    function, shapes, split = CASES[case]
    split = [i for i in split if len(shapes[i]) == 4]
    with forced(algorithm):
        if case in ("grouped", "self", "cross", "relative", "gram"):
            assert_parity(function, shapes, {i: [0, -2] for i in split}, mesh_of(2, 2))
        if case != "grouped":
            assert_parity(function, shapes, {i: [1, -2] for i in split}, mesh_of(2, 2))


IMAGES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": (torch.arange(15)[:, None] * torch.arange(15)) % 4 != 1},
    "masked_rows": {"attn_mask": (torch.arange(15)[:, None] + torch.arange(15)) < 20},
}


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("options", "algorithm"), choose(IMAGES, ALGORITHMS))
def test_flattened_image(options, algorithm):
    """Rows and columns are split; the sequence is their product."""

    def function(q, k, v):
        q, k, v = (x.flatten(2).unflatten(1, (4, 2)).mT for x in (q, k, v))
        return SDPA(q, k, v, **IMAGES[options]).mT.flatten(1, 2).unflatten(2, (3, 5))

    shapes, split = [(2, 8, 3, 5)] * 3, {0: [2, 3], 1: [2, 3], 2: [2, 3]}
    with forced(algorithm) as used:
        assert_parity(function, shapes, split, mesh_of(2, 2))
    assert used == [algorithm]


MASKS = {  # of 7 queries and 5 keys, with how the mask itself is split
    "masked_rows": (torch.arange(7)[:, None] > torch.arange(5) + 2, None),
    "minus_infinity": (torch.where(PLACES % 5 == 0, -torch.inf, PLACES * 0.1).double(), None),
    "split_rows": (PLACES % 3 > 0, -2),
    "split_columns": (PLACES % 3 > 0, -1),
    "split_keys": (torch.tensor([True, False, True, True, False]).expand(2, 1, 1, 5), -1),
    "per_batch": ((torch.arange(70).reshape(2, 1, 7, 5) % 3 > 0), -2),
    "per_head": ((torch.arange(140).reshape(4, 7, 5) % 3 > 0), -2),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("name", "algorithm"), choose(MASKS, ALGORITHMS))
def test_mask(name, algorithm):
    whole, dim = MASKS[name]

    def function(q, k, v):
        mask = whole
        if dim is not None and isinstance(q, lightning_shard.DomainTensor):
            mask = lightning_shard.shard(whole, mesh_of(3), dim)
        return SDPA(q, k, v, mask)

    with forced(algorithm) as used:
        assert_parity(function, [Q, K, K], {i: [2] for i in range(3)}, mesh_of(3))
        with sdpa_kernel(SDPBackend.MATH):
            assert_double_backward(function, [Q, K, K], {i: [2] for i in range(3)}, mesh_of(3))
    assert used == [algorithm]  # decided once for operands that are alike


@pytest.mark.spmd(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mask_split_unlike_queries(algorithm):
    """A product of dims against one dim of the same rows; heads of the mask alone."""

    def function(q, bias):
        q = q.flatten(2, 3)
        return SDPA(q, q, q, bias)

    shapes = [(1, 2, 2, 4, 3), (2, 8, 8)]
    with forced(algorithm):
        assert_parity(function, shapes, {0: [3], 1: [1]}, mesh_of(3))
        assert_parity(lambda q, b: SDPA(q, q, q, b), [Q, (4, 7, 7)], {1: [0]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("causal", "algorithm"), choose([False, True], ALGORITHMS))
def test_fewer_rows_than_ranks(causal, algorithm):
    def function(q, k, v):
        return SDPA(q, k, v, is_causal=causal)

    shape = (2, 2, 3, 5)
    with forced(algorithm):
        assert_parity(function, [shape] * 3, {0: [2], 1: [2], 2: [2]}, mesh_of(4))
        assert_parity(function, [shape] * 3, {0: [0], 1: [0], 2: [0]}, mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("case", "algorithm"), choose(CASES, ALGORITHMS, every=2))
def test_double_backward(case, algorithm):
    function, shapes, split = CASES[case]
    with forced(algorithm), sdpa_kernel(SDPBackend.MATH):
        assert_double_backward(function, shapes, {i: [-2] for i in split}, mesh_of(3))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision(algorithm):
    torch.manual_seed(0)
    q = torch.randn(Q)
    split = lightning_shard.shard(q, mesh_of(2), 2)
    with forced(algorithm), torch.autocast("cpu", torch.bfloat16):
        expected, result = SDPA(q, q, q), SDPA(split, split, split)
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(lightning_shard.gather(result), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dropped_weights(algorithm):
    q = lightning_shard.shard(torch.zeros(1, 3, 60, 4), mesh_of(3), 2)
    v = lightning_shard.shard(torch.eye(60).expand(1, 3, 60, 60), mesh_of(3), 2)
    with forced(algorithm):
        weights = lightning_shard.gather(SDPA(q, q, v, dropout_p=0.25)) * 60 * 0.75
    torch.testing.assert_close(weights, weights.round())  # 0 or 1
    assert abs(weights.mean() - 0.75) < 0.02
    parts = [*weights[0], *weights.split(20, 2)]
    assert not any(torch.equal(a, b) for a in parts for b in parts if a is not b)
    state = torch.get_rng_state()
    of_first = state.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(state, of_first)  # the ranks stay in step


@pytest.mark.spmd(3)
@pytest.mark.parametrize("rows", [8, 2])
def test_dropped_weights_of_one_process(rows):
    """Also with masks, grouped heads, and on a rank without rows; all ranks stay in step."""
    learned = torch.randn(rows, rows, dtype=torch.float64)
    masks = {
        "none": {},
        "causal": {"is_causal": True},
        "of numbers": {"attn_mask": learned, "scale": 0.3},
        "with an empty row": {"attn_mask": (learned > 0) & (torch.arange(rows) > 0).unsqueeze(1)},
        "grouped": {"enable_gqa": True},
    }

    def attend(x, options):
        torch.manual_seed(1)
        keys = x[:, :2] if "enable_gqa" in options else x
        with lightning_shard.use_exact_random():
            out = SDPA(x, keys * 2, keys, dropout_p=0.4, **options)
        return out, torch.rand(1)

    for name, options in masks.items():
        whole = torch.randn(2, 4, rows, 3, dtype=torch.float64, requires_grad=True)
        expected, after = attend(whole, options)
        (wanted,) = torch.autograd.grad(expected.square().sum(), whole)
        for dim in (1, 2):
            if dim == 1 and name == "grouped":
                continue
            split = lightning_shard.shard(whole.detach(), mesh_of(3), dim).requires_grad_()
            out, later = attend(split, options)
            assert torch.equal(after, later)
            assert_same(lightning_shard.gather(out.detach()), expected.detach())
            (gradient,) = torch.autograd.grad(out.square().sum(), split)
            assert_same(lightning_shard.gather(gradient), wanted)


@pytest.mark.spmd(3)
def test_dropout_keeps_a_rank_without_rows_in_step():
    split = lightning_shard.shard(torch.randn(1, 2, 2, 4), mesh_of(3), 2)
    torch.manual_seed(0)
    SDPA(split, split, split, dropout_p=0.5)
    number = torch.rand(1)
    of_first = number.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(number, of_first)


FEATURES = {  # attention over channels: which dims of queries, keys and values are split
    "all": {0: [-1], 1: [-1], 2: [-1]},
    "scores": {0: [-1], 1: [-1]},
    "values": {2: [-1]},
}


@pytest.mark.quick_rows("6-scores", "3-all", "3-values")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("width", [6, 3])
def test_split_features(name, width):
    shapes = [(2, 4, 7, width), (2, 4, 5, width), (2, 4, 5, width)]
    assert_parity(SDPA, shapes, FEATURES[name], mesh_of(4))
    assert_parity(lambda *x: SDPA(*x, PLACES % 3 > 0), shapes, FEATURES[name], mesh_of(4))
    assert_parity(lambda *x: SDPA(*x, is_causal=True), shapes, FEATURES[name], mesh_of(4))
    assert_parity(SDPA, shapes, {i: [0, -1] for i in FEATURES[name]}, mesh_of(2, 2))
    with sdpa_kernel(SDPBackend.MATH):
        assert_double_backward(SDPA, shapes, FEATURES[name], mesh_of(4))
    no_keys = [(2, 4, 7, width), (2, 4, 0, width), (2, 4, 0, width)]
    assert_parity(SDPA, no_keys, FEATURES[name], mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_features_of_half_precision(dtype):
    """Torch's kernels compute the scores in float32: rounded ones of 100 are wrong by a tenth."""
    found = []
    x = 6 * torch.randn(3, 2, 4, 7, 6).to(dtype)
    for kind, split in ((dtype, True), (torch.float64, False)):
        leaf = x.to(kind).requires_grad_()
        given = lightning_shard.shard(leaf, mesh_of(3), 4) if split else leaf
        value = lightning_shard.gather(SDPA(*given))
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        if split:
            dist.all_reduce(gradient)
        found.append([value.detach(), gradient / (3 if split else 1)])
    for mine, wanted in zip(*found, strict=True):
        error = (mine - wanted).abs().max() / wanted.abs().max()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.spmd(3)
def test_refusals():
    split = lightning_shard.shard(torch.randn(Q), mesh_of(3), 3)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="features of query"):
        SDPA(torch.cat([split, split], 1), split, split, enable_gqa=True)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="features of query"):
        SDPA(split, lightning_shard.shard(torch.randn(Q), mesh_of(3), 2), split)
    heads = lightning_shard.shard(torch.randn(Q), mesh_of(3), 1)
    with pytest.raises(lightning_shard.UnsupportedOperationError, match="enable_gqa"):
        SDPA(heads, heads, heads, enable_gqa=True)


@pytest.mark.spmd(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("causal", [False, True])
def test_traffic_and_memory(algorithm, causal):
    """What a rank sends and keeps, in units of its own queries."""
    kept, rank = [], dist.get_rank()

    def pack(x):
        kept.append(x.nbytes)
        return x

    rows = [torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3)]
    q, k, v = (lightning_shard.from_local(x, mesh_of(4), 2, (1, 4, 16, 8)) for x in rows)
    unit = rows[0].nbytes
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with forced(algorithm), counted() as forward, saved:
        out = SDPA(q, k, v, is_causal=causal).to_local()
    with counted() as backward:
        torch.autograd.grad(out, rows, torch.ones_like(out))
    later = 3 - rank if causal else 3  # the ranks that need my keys
    earlier = rank if causal else 3  # the ranks whose keys I need
    wanted = {
        "gather": (6, 6),
        "all_to_all": (3, 3),
        "ring": (2 * later, 2 * later + 2 * earlier),
    }
    assert (forward.bytes / unit, backward.bytes / unit) == wanted[algorithm]
    assert sum(kept) > 8 * unit if algorithm == "gather" else sum(kept) < 6 * unit
    if algorithm != "ring":  # operands that travel alike do so in one message
        messages = 2 if algorithm == "all_to_all" else 1  # the output travels back
        assert (forward.calls, backward.calls) == (messages, messages)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("limit", [attention_layout.TOGETHER, 0], ids=["together", "alone"])
def test_an_image_as_a_sequence(limit):
    """Rows of a flattened image lie in order on each rank, so nothing is put in order."""

    def image(x, algorithm="all_to_all"):
        heads = x.flatten(2).transpose(1, 2).unflatten(2, (2, 4)).transpose(1, 2)
        with mock.patch.object(attention_layout, "TOGETHER", limit), forced(algorithm):
            return SDPA(heads * 2, heads * 3, heads)

    assert_parity(image, [(2, 8, 6, 5)], {0: [2]}, mesh_of(2))
    with sdpa_kernel(SDPBackend.MATH):
        assert_double_backward(image, [(2, 8, 6, 5)], {0: [2]}, mesh_of(2))
    field = lightning_shard.shard(torch.randn(2, 8, 6, 5), mesh_of(2), 2)
    with counted() as traffic:
        image(field)
    assert traffic.calls == (2 if limit else 4)


@pytest.mark.spmd(2)
def test_rows_in_order_are_not_put_in_order():
    """Those of a flattened image that is split along its first dim."""
    field = lightning_shard.shard(torch.randn(2, 8, 6, 5), mesh_of(2), 2)
    factors = field.flatten(2).subdomain.layout.dims[2]
    assert len(factors) == 2
    counts, order = rows_by_owner(factors, field.subdomain.layout.grid)
    assert (counts, order) == ([15, 15], None)
    sideways = lightning_shard.shard(torch.randn(2, 8, 6, 5), mesh_of(2), 3).flatten(2)
    counts, order = rows_by_owner(sideways.subdomain.layout.dims[2], field.subdomain.layout.grid)
    assert counts == [18, 12]
    assert order is not None
    assert order.tolist()[:4] == [0, 1, 2, 5]


CHOICES = {  # shapes of query and of key, which operands are split; the algorithm
    "heads": ((1, 8, 16, 4), (1, 8, 16, 4), {0, 1, 2}, "all_to_all"),
    "batch": ((4, 1, 16, 4), (4, 1, 16, 4), {0, 1, 2}, "all_to_all"),
    "three_heads": ((1, 3, 16, 4), (1, 3, 16, 4), {0, 1, 2}, "all_to_all"),
    "five_heads": ((1, 5, 16, 4), (1, 5, 16, 4), {0, 1, 2}, "gather"),
    "one_head": ((1, 1, 16, 4), (1, 1, 16, 4), {0, 1, 2}, "gather"),
    "long": ((1, 1, 2**20, 16), (1, 1, 2**20, 16), {0, 1, 2}, "ring"),
    "few_keys": ((1, 8, 256, 4), (1, 8, 16, 4), {0, 1, 2}, "gather"),
    "plain_keys": ((1, 8, 16, 4), (1, 8, 16, 4), {0}, "gather"),
    "plain_queries": ((1, 8, 4, 4), (1, 8, 16, 4), {1, 2}, "all_to_all"),
}


@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", CHOICES)
def test_choice(name):
    """By integers alone, so that all ranks agree; nothing is computed."""
    of_query, of_key, split, expected = CHOICES[name]
    assert chosen([of_query, of_key, of_key], split, 4) == expected


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("rows", "causal", "expected"),
    [(16, False, "gather"), (16, True, "all_to_all"), (2**19, False, "all_to_all")],
)
def test_choice_where_both_send_the_same(rows, causal, expected):
    assert chosen([(1, 2, rows, 16)] * 3, {0, 1, 2}, 2, causal) == expected


def chosen(shapes, split, ranks, causal=False):
    operands = [
        lightning_shard.shard(torch.zeros(shape), mesh_of(ranks), 2).subdomain
        if i in split
        else torch.empty(shape)
        for i, shape in enumerate(shapes)
    ]
    given = Operands(*operands, mask=None, grouped=False, causal=causal)
    decision = attention._decided(given, with_dropout=False)
    assert decision is not None
    return decision[1]
