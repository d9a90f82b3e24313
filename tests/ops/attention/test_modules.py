"""Modules with attention, unmodified: their own masks, options, and fast paths for inference."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
)
from transformers import T5Config, T5ForConditionalGeneration

import lightning_shard
from tests.pairs import choose
from tests.parity import assert_double_backward, assert_parity, assert_parity_of_module, mesh_of

PADDING = torch.tensor([[0, 0, 0, 1, 0, 1, 1], [0] * 7]).bool()
LATER = torch.ones(7, 7).triu(1).bool()
BIAS = (torch.arange(7)[:, None] * torch.arange(7)).double().sin()


class Attention(nn.MultiheadAttention):
    """Self-attention with given arguments."""

    def __init__(self, options, **arguments):
        super().__init__(8, 2, **options, dtype=torch.float64)
        self.arguments = arguments

    def forward(self, x):
        return super().forward(x, x, x, **self.arguments)


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "later": {"attn_mask": LATER},
    "causal": {"attn_mask": LATER, "is_causal": True},
    "bias": {"attn_mask": BIAS, "key_padding_mask": PADDING.double() * -3},
    "heads": {"attn_mask": BIAS.expand(4, 7, 7) > 0, "average_attn_weights": False},
}
OPTIONS = [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]


@pytest.mark.quick_rows(
    "none-0-True",
    "padding-1-True",
    "later-0-True",
    "causal-0-False",
    "bias-1-False",
    "heads-1-True",
)
@pytest.mark.spmd(3)
@pytest.mark.parametrize(("masks", "dim", "weights"), choose(MASKS, [0, 1], [True, False], fast=2))
def test_masks(masks, dim, weights):
    torch.manual_seed(0)
    module = Attention({"batch_first": True}, need_weights=weights, **MASKS[masks])
    assert_parity_of_module(module, (2, 7, 8), [dim], mesh_of(3))
    assert_parity_of_module(module.eval(), (2, 7, 8), [dim], mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("options", "weights"), choose(OPTIONS, [True, False]), ids=str)
def test_options(options, weights):
    torch.manual_seed(0)
    module = Attention(options, need_weights=weights, key_padding_mask=PADDING)
    for dim in (0, 1):
        assert_parity_of_module(module, (7, 2, 8), [dim], mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("weights", [True, False])
def test_unbatched_and_other_widths(weights):
    torch.manual_seed(0)
    module = Attention({}, need_weights=weights, attn_mask=LATER)
    assert_parity_of_module(module, (7, 8), [0], mesh_of(3))

    class Cross(Attention):
        def forward(self, q, k, v):
            return nn.MultiheadAttention.forward(self, q, k, v, **self.arguments)

    module = Cross({"kdim": 3, "vdim": 4}, need_weights=weights)
    assert_parity_of_module(module, [(7, 2, 8), (5, 2, 3), (5, 2, 4)], [0], mesh_of(3))


@pytest.mark.spmd(3)
def test_split_padding_mask():
    class Padded(Attention):
        def forward(self, x):
            mask = PADDING
            if isinstance(x, lightning_shard.DomainTensor):
                mask = lightning_shard.shard(mask, mesh_of(3), 1)
            return nn.MultiheadAttention.forward(
                self, x, x, x, key_padding_mask=mask, **self.arguments
            )

    torch.manual_seed(0)
    module = Padded({"batch_first": True}, need_weights=False)
    assert_parity_of_module(module, (2, 7, 8), [1], mesh_of(3))


LAYERS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"src_mask": LATER, "is_causal": True},
}


class With(nn.Module):
    """A module called with given arguments."""

    def __init__(self, module, **arguments):
        super().__init__()
        self.module, self.arguments = module, arguments

    def forward(self, *inputs):
        return self.module(*inputs, **self.arguments)


@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("masks", "norm_first", "training"), choose(LAYERS, [True, False], [True, False], fast=2)
)
def test_encoder_layer(masks, norm_first, training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    module = With(layer.double().train(training), **LAYERS[masks])
    assert_parity_of_module(module, (2, 7, 8), [1], mesh_of(4))
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    with torch.no_grad():  # in evaluation torch takes its fast path
        result = module(lightning_shard.shard(x, mesh_of(4), 1))
        torch.testing.assert_close(lightning_shard.gather(result), module(x))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("training", [True, False])
def test_decoder_layer(training):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True).double().train(training)
    masks = {"tgt_mask": LATER, "tgt_is_causal": True, "memory_key_padding_mask": PADDING[:, 2:]}
    assert_parity_of_module(With(layer, **masks), [(2, 7, 8), (2, 5, 8)], [1], mesh_of(4))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("training", [True, False])
def test_encoder(training):
    """Nested tensors are a fast path of inference, for rows that are padded at the end."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    module = With(encoder, src_key_padding_mask=PADDING)
    assert_parity_of_module(module, (2, 7, 8), [1], mesh_of(3))
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    split = lightning_shard.shard(x, mesh_of(3), 1)
    with torch.no_grad():
        torch.testing.assert_close(lightning_shard.gather(module(split)), module(x))
        module.arguments["src_key_padding_mask"] = PADDING.sort(1).values
        if training:
            torch.testing.assert_close(lightning_shard.gather(module(split)), module(x))
        else:
            with pytest.raises(
                lightning_shard.UnsupportedOperationError, match="enable_nested_tensor=False"
            ):
                module(split)


@pytest.mark.quick_rows("0-ShiftedWindowAttention", "1-ShiftedWindowAttentionV2")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("kind", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
@pytest.mark.parametrize("shift", [0, 1])
def test_window_attention(kind, shift):
    torch.manual_seed(0)
    module = kind(4, [3, 2], [shift, shift], 2).double()
    assert_parity_of_module(module, (1, 7, 9, 4), [1], mesh_of(4))
    assert_parity_of_module(module, (1, 7, 9, 4), [2], mesh_of(4))
    assert_parity_of_module(module, (1, 7, 9, 4), [1, 2], mesh_of(2, 2))


def neighbourhood(q, k, v):
    """Each pixel attends to the 3 x 3 pixels around it, with two heads."""
    b, c, h, w = q.shape
    k, v = (F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h * w) for x in (k, v))
    scores = (q.view(b, 2, c // 2, 1, h * w) * k).sum(2, keepdim=True)
    return (scores.softmax(3) * v).sum(3).reshape(b, c, h, w)


def by_einsum(q, k, v):
    """The spatial attention of U-Nets."""
    b, c, h, w = q.shape
    q, k, v = (x.reshape(b, 2, c // 2, h * w) for x in (q, k, v))
    weights = torch.einsum("bhcq,bhck->bhqk", q * c**-0.5, k).softmax(-1)
    return torch.einsum("bhqk,bhck->bhcq", weights, v).reshape(b, c, h, w)


def by_bmm(q, k, v):
    b, c, h, w = q.shape
    q, k, v = (x.reshape(b, c, h * w) for x in (q, k, v))
    weights = torch.softmax(torch.bmm(q.permute(0, 2, 1), k) * c**-0.5, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1)).reshape(b, c, h, w)


@pytest.mark.slow_rows("neighbourhood")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("function", [neighbourhood, by_einsum, by_bmm])
def test_written_out(function):
    shapes = [(2, 4, 5, 6)] * 3
    for dims, mesh in (([2], (4,)), ([3], (4,)), ([2, 3], (2, 2))):
        split = dict.fromkeys(range(3), dims)
        assert_parity(function, shapes, split, mesh_of(*mesh))
        assert_double_backward(function, shapes, split, mesh_of(*mesh))


class Decoder(nn.Module):
    """T5 with relative bias, target split too; without the cache of generation."""

    def __init__(self):
        super().__init__()
        config = T5Config(
            vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config)

    def forward(self, x, y):
        return self.model(inputs_embeds=x, decoder_inputs_embeds=y, use_cache=False).logits


@pytest.mark.spmd(3)
def test_t5():
    torch.manual_seed(0)
    module = Decoder().double()
    tolerance = 1e-5  # its norms are computed in float32
    shapes = [(2, 11, 16), (2, 7, 16)]
    assert_parity_of_module(module, shapes, [1], mesh_of(3), tolerance=tolerance)
