"""segment-anything: the encoder of images, and the decoder of masks behind it."""

from functools import partial

import torch
from segment_anything.modeling import MaskDecoder, PromptEncoder, TwoWayTransformer
from segment_anything.modeling.image_encoder import ImageEncoderViT
from torch import nn

from benchmarks.model_zoo import Apply, Case, row


def encoder(**options):
    return ImageEncoderViT(
        img_size=64, patch_size=4, embed_dim=16, depth=2, num_heads=2, out_chans=8,
        norm_layer=partial(nn.LayerNorm, eps=1e-6), use_rel_pos=True, **options,
    )  # fmt: skip


def segmented(image_encoder, prompts, decoder, x):
    """Masks and their qualities for one point and one box, which it encodes in float32."""
    prompts.pe_layer.float()
    points = torch.tensor([[[20.0, 31.0]]]), torch.tensor([[1]])
    boxes = torch.tensor([[3.0, 5.0, 40.0, 50.0]])
    sparse, dense = prompts(points, boxes, None)
    return decoder(image_encoder(x), prompts.get_dense_pe(), sparse, dense, True)


CASES = {
    "image_encoder": Case(encoder, [(1, 3, 64, 64)]),
    "image_encoder_windows": row(encoder, window_size=7, global_attn_indexes=(1,),
        on=(1, 3, 64, 64)),
    "sam": Case(lambda: Apply(segmented, encoder(window_size=7, global_attn_indexes=(1,)),
        PromptEncoder(8, (16, 16), (64, 64), 4),
        MaskDecoder(transformer_dim=8, transformer=TwoWayTransformer(1, 8, 2, 16))),
        [(1, 3, 64, 64)], (2, 3), 1e-5),
}  # fmt: skip
