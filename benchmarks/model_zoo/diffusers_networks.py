"""diffusers: networks that remove noise from images, videos, sound and latents."""

import diffusers as d
import torch
from torch import Tensor

from benchmarks.model_zoo import row


def values(*shape: int) -> Tensor:
    """What a text encoder would give, or another condition that stays whole."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


STEP = torch.tensor([7])
MASK, ONES = torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 5)
TEXT, WORDS = values(1, 5, 12), values(1, 5, 10)
POOLED = values(1, 10)
SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
HEADS = SMALL | {"attention_head_dim": 4}
CROSS = HEADS | {"cross_attention_dim": 12}
IMAGE, LATENTS, FILM = (1, 4, 18, 12), (1, 4, 16, 12), (1, 4, 3, 16, 12)
OVER_IMAGES = (3, 4)


def net(kind, *arguments, on, given=(STEP,), named=None, split=(), within=1e-10, **options):
    """A row: the tensor that a model returns for its first input; the others are always alike."""

    def run(model, x):
        others = [value.clone() for value in given]
        return model(x, *others, **named or {}, return_dict=False)[0]

    return row(kind, *arguments, **options, on=on, split=split, within=within, run=run)


def blocks(kind: str, dims: str, other: str = "") -> dict[str, tuple[str, str]]:
    """Two blocks down and two up, of which the outer ones attend."""
    down, up = f"{other}DownBlock{dims}", f"{other}UpBlock{dims}"
    return {
        "down_block_types": (f"{kind}DownBlock{dims}", down),
        "up_block_types": (up, f"{kind}UpBlock{dims}"),
    }


FLAT_BLOCKS = blocks("CrossAttn", "2D")
CASES = {
    "unet_1d": net(d.UNet1DModel, 64, extra_in_channels=64, block_out_channels=(32, 32, 64),
        on=(1, 2, 32)),
    "unet_2d": net(d.UNet2DModel, None, 3, 3, **HEADS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), on=(1, 3, 18, 12)),
    "unet_2d_condition": net(d.UNet2DConditionModel, None, **FLAT_BLOCKS, **CROSS,
        given=(STEP, TEXT), on=IMAGE),
    "unet_2d_cross_attention": net(d.UNet2DConditionModel, None, **FLAT_BLOCKS, **CROSS,
        only_cross_attention=True, use_linear_projection=True, given=(STEP, TEXT), on=IMAGE),
    "unet_3d_condition": net(d.UNet3DConditionModel, None, **blocks("CrossAttn", "3D"), **CROSS,
        given=(STEP, TEXT), on=(1, 4, 3, 18, 12), split=OVER_IMAGES),
    "unet_spatio_temporal": net(d.UNetSpatioTemporalConditionModel, None, 8, 4,
        *blocks("CrossAttn", "SpatioTemporal").values(), (32, 64), 32, 96, layers_per_block=1,
        cross_attention_dim=32, num_attention_heads=(2, 4),
        given=(STEP, values(1, 1, 32), values(1, 3)), on=(1, 2, 8, 16, 12), split=OVER_IMAGES),
    "unet_motion": net(d.UNetMotionModel, None, **blocks("CrossAttn", "Motion"), **SMALL,
        cross_attention_dim=12, num_attention_heads=2, motion_num_attention_heads=2,
        given=(STEP, values(3, 5, 12)), on=FILM, split=OVER_IMAGES),
    "controlnet": row(d.ControlNetModel, down_block_types=FLAT_BLOCKS["down_block_types"], **CROSS,
        conditioning_embedding_out_channels=(4, 8), on=[LATENTS, (1, 3, 32, 24)],
        run=lambda m, x, image: m(x, 7, TEXT, image, return_dict=False)[0]),
    "stable_cascade": net(d.StableCascadeUNet, 4, 4, 8, 1, 16, (16, 16), (2, 2), (1, 1), (1, 1),
        clip_text_pooled_in_channels=10, dropout=0.0, given=(values(1), values(1, 1, 10)),
        on=LATENTS),
    "dit": net(d.DiTTransformer2DModel, 2, 6, 4, sample_size=16, patch_size=2, num_layers=2,
        norm_num_groups=2, given=(STEP, torch.tensor([3])), on=(1, 4, 16, 16)),
    "pixart": net(d.PixArtTransformer2DModel, 2, 6, 4, 4, num_layers=2, cross_attention_dim=12,
        sample_size=16, caption_channels=10, use_additional_conditions=False, given=(WORDS, STEP),
        on=(1, 4, 16, 16)),
    "sd3": net(d.SD3Transformer2DModel, 16, 2, 4, 2, 8, 2, 12, 16, 10, out_channels=4,
        pos_embed_max_size=24, given=(TEXT, POOLED, STEP), on=IMAGE),
    "flux": net(d.FluxTransformer2DModel, 1, 4, None, 1, 2, 8, 2, 12, 10, False, (2, 2, 4),
        given=(TEXT, POOLED, values(1)), named={
            "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 6, 4))).double(),
            "txt_ids": torch.zeros(5, 3, dtype=torch.float64)},
        on=(1, 24, 4), split=(1,), within=1e-5),
    "sana": net(d.SanaTransformer2DModel, 4, 4, 2, 6, 2, 2, 6, 12, 10, sample_size=16,
        patch_size=1, given=(WORDS, STEP), on=(1, 4, 16, 16), within=1e-5),
    "lumina2": net(d.Lumina2Transformer2DModel, 16, 2, 4, None, 24, 2, 1, 3, 1, 8,
        axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=10,
        given=(STEP, WORDS, MASK), on=LATENTS, within=1e-5),
    "aura_flow": net(d.AuraFlowTransformer2DModel, 16, 2, 4, 1, 1, 8, 2, 10, 16, 4, 96,
        given=(WORDS, STEP), on=LATENTS, within=1e-5),
    "cogvideox": net(d.CogVideoXTransformer3DModel, 2, 8, 4, 4, time_embed_dim=6,
        text_embed_dim=10, num_layers=2, sample_width=12, sample_height=16, sample_frames=5,
        max_text_seq_length=5, given=(WORDS, STEP), on=(1, 2, 4, 16, 12), split=OVER_IMAGES),
    "wan": net(d.WanTransformer3DModel, (1, 2, 2), 2, 12, 4, 4, 10, 8, 16, 2, given=(STEP, WORDS),
        on=FILM, split=OVER_IMAGES, within=1e-5),
    "ltx": net(d.LTXVideoTransformer3DModel, 4, 4, 1, 1, 2, 8, 16, num_layers=2,
        caption_channels=10, given=(WORDS, STEP, ONES),
        named={"num_frames": 2, "height": 6, "width": 4}, on=(1, 48, 4), split=(1,), within=1e-5),
    "hunyuan_video": net(d.HunyuanVideoTransformer3DModel, 4, 4, 2, 8, 1, 1, 1, 2.0,
        guidance_embeds=False, text_embed_dim=10, pooled_projection_dim=6, rope_axes_dim=(2, 2, 4),
        given=(STEP, WORDS, ONES, values(1, 6)), on=FILM, split=OVER_IMAGES, within=1e-5),
    "mochi": net(d.MochiTransformer3DModel, 2, 2, 8, 2, 6, 4, None, "rms_norm", 16, 8,
        given=(values(1, 5, 16), STEP, MASK), on=FILM, split=OVER_IMAGES, within=1e-5),
}  # fmt: skip
