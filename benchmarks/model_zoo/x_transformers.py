"""x-transformers: kinds of attention, split along the sequence."""

import torch
import x_transformers as xt

from benchmarks.model_zoo import Float32, row

FLOAT32 = 1e-5  # its softmax is of float32
SIZES = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}


def of(kind, on=(2, 17, 16), *, layers=xt.Decoder, split=(1,), within=FLOAT32, **options):
    """A row of a model that is made around attention layers."""
    return row(
        lambda: kind(attn_layers=layers(**SIZES), **options), on=on, split=split, within=within
    )


def decoder(within=FLOAT32, **options):
    return row(xt.Decoder, **SIZES, **options, on=(2, 17, 16), split=(1,), within=within)


def encoder(**options):
    return row(xt.Encoder, **SIZES, **options, on=(2, 17, 16), split=(1,), within=FLOAT32)


def ids():
    return torch.randint(0, 32, (2, 17))


def language(**options):
    return xt.AutoregressiveWrapper(xt.TransformerWrapper(**options))


CASES = {
    "encoder": encoder(),
    "decoder": decoder(),
    "tokens": of(xt.TransformerWrapper, ids, num_tokens=32, max_seq_len=24),
    "flash": decoder(1e-10, attn_flash=True),
    "rotary": decoder(rotary_pos_emb=True),
    "rotary_xpos": decoder(rotary_xpos=True),
    "alibi": decoder(alibi_pos_bias=True),
    "relative_bias": decoder(rel_pos_bias=True),
    "dynamic_bias": row(xt.Encoder, **SIZES, dynamic_pos_bias=True, on=(2, 17, 16), split=(1,),
        within=1e-4, wrap=Float32),
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
    "cross": row(xt.Decoder, **SIZES, cross_attend=True, on=[(2, 17, 16), (2, 9, 16)], split=(1,),
        within=FLOAT32, run=lambda m, x, c: m(x, context=c)),
    "vision": of(xt.ViTransformerWrapper, (1, 3, 24, 24), layers=xt.Encoder, image_size=24,
        patch_size=4, num_classes=5, split=(2, 3)),
    "continuous": of(xt.ContinuousTransformerWrapper, (2, 17, 3), layers=xt.Encoder, dim_in=3,
        dim_out=2, max_seq_len=20),
    "autoregressive_loss": of(language, ids, num_tokens=32, max_seq_len=24),
}  # fmt: skip
