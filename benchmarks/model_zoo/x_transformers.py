"""x-transformers: kinds of attention, split along the sequence."""

import torch
import x_transformers as xt

from benchmarks.model_zoo import Apply, Case, Float32, called

FLOAT32 = 1e-5  # its softmax is of float32
SIZES = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}


def decoder(tolerance=FLOAT32, *, ids=False, **options):
    """A causal transformer over embeddings, or over tokens."""
    if ids:
        return Case(
            lambda: xt.TransformerWrapper(
                num_tokens=32, max_seq_len=24, attn_layers=xt.Decoder(**SIZES, **options)
            ),
            [lambda: torch.randint(0, 32, (2, 17))], (1,), tolerance,
        )  # fmt: skip
    return Case(lambda: xt.Decoder(**SIZES, **options), [(2, 17, 16)], (1,), tolerance)


def encoder(**options):
    return Case(lambda: xt.Encoder(**SIZES, **options), [(2, 17, 16)], (1,), FLOAT32)


CASES = {
    "encoder": encoder(),
    "decoder": decoder(),
    "tokens": decoder(ids=True),
    "flash": decoder(1e-10, attn_flash=True),
    "rotary": decoder(rotary_pos_emb=True),
    "rotary_xpos": decoder(rotary_xpos=True),
    "alibi": decoder(alibi_pos_bias=True),
    "relative_bias": decoder(rel_pos_bias=True),
    "dynamic_bias": Case(lambda: Float32(called, xt.Encoder(**SIZES, dynamic_pos_bias=True)),
        [(2, 17, 16)], (1,), 1e-4),
    "grouped_query": decoder(attn_kv_heads=1),
    "multi_query_flash": decoder(1e-10, attn_one_kv_head=True, attn_flash=True),
    "talking_heads": decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "qk_norm": decoder(1e-10, attn_qk_norm=True),
    "sparse_topk": encoder(attn_sparse_topk=3),
    "memory_key_values": encoder(attn_num_mem_kv=3),
    "glu": encoder(ff_glu=True, ff_swish=True),
    "rms_norm": encoder(use_rmsnorm=True),
    "scale_norm": encoder(use_scalenorm=True),
    "sandwich": decoder(sandwich_norm=True),
    "macaron": encoder(macaron=True),
    "shift_tokens": decoder(shift_tokens=1),
    "residual_attention": encoder(residual_attn=True),
    "value_residual": decoder(add_value_residual=True),
    "hyper_connections": decoder(num_residual_streams=2),
    "cope": decoder(attn_flash=False, attn_use_cope=True, attn_cope_max_pos=17),
    "gate_values": encoder(attn_gate_values=True),
    "cross": Case(lambda: Apply(lambda m, x, c: m(x, context=c),
        xt.Decoder(**SIZES, cross_attend=True)), [(2, 17, 16), (2, 9, 16)], (1,), FLOAT32),
    "vision": Case(lambda: xt.ViTransformerWrapper(image_size=24, patch_size=4, num_classes=5,
        attn_layers=xt.Encoder(**SIZES)), [(1, 3, 24, 24)], (2, 3), FLOAT32),
    "continuous": Case(lambda: xt.ContinuousTransformerWrapper(dim_in=3, dim_out=2, max_seq_len=20,
        attn_layers=xt.Encoder(**SIZES)), [(2, 17, 3)], (1,), FLOAT32),
    "autoregressive_loss": Case(
        lambda: xt.AutoregressiveWrapper(
            xt.TransformerWrapper(num_tokens=32, max_seq_len=24, attn_layers=xt.Decoder(**SIZES))
        ),
        [lambda: torch.randint(0, 32, (2, 17))], (1,), FLOAT32,
    ),
}  # fmt: skip
