"""diffusers: networks that remove noise from images, videos, sound and latents."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from benchmarks.model_zoo import Apply, Case

Given = Callable[[], Any]


def called(make: Callable[[], Any], *rest: Given, **named: Given) -> Callable[[], Apply]:
    """The tensor that a model returns for its first input; the other ones are made anew."""

    def run(model: Any, x: Tensor) -> Tensor:
        arguments = {name: value() for name, value in named.items()}
        return model(x, *(value() for value in rest), **arguments, return_dict=False)[0]

    return lambda: Apply(run, make())


def step() -> Tensor:
    return torch.tensor([7])


def text(*shape: int) -> Given:
    """What a text encoder would give, or another condition that stays whole."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return lambda: values


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Given:
    return lambda: torch.ones(*shape, dtype=dtype)


def zeros(*shape: int) -> Given:
    return lambda: torch.zeros(*shape, dtype=torch.float64)


SMALL: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1}
GROUPS: dict[str, Any] = {"norm_num_groups": 4, "attention_head_dim": 4}
CROSS: dict[str, Any] = SMALL | GROUPS | {"cross_attention_dim": 12}


def _unet_2d() -> Any:
    return diffusers.UNet2DModel(
        None, 3, 3, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **SMALL, **GROUPS,
    )  # fmt: skip


def _unet_2d_condition(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        None, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **CROSS, **more,
    )  # fmt: skip


def _unet_3d_condition() -> Any:
    return diffusers.UNet3DConditionModel(
        None, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), **CROSS,
    )  # fmt: skip


def _unet_spatio_temporal() -> Any:
    blocks = "DownBlockSpatioTemporal", "UpBlockSpatioTemporal"
    return diffusers.UNetSpatioTemporalConditionModel(
        None, 8, 4, (f"CrossAttn{blocks[0]}", blocks[0]), (blocks[1], f"CrossAttn{blocks[1]}"),
        (32, 64), 32, 96, layers_per_block=1, cross_attention_dim=32, num_attention_heads=(2, 4),
    )  # fmt: skip


def _unet_motion() -> Any:
    return diffusers.UNetMotionModel(
        None, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), norm_num_groups=4,
        cross_attention_dim=12, num_attention_heads=2, motion_num_attention_heads=2, **SMALL,
    )  # fmt: skip


def _controlnet() -> Any:
    return diffusers.ControlNetModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(4, 8), **CROSS,
    )  # fmt: skip


def _stable_cascade() -> Any:
    return diffusers.StableCascadeUNet(
        4, 4, 8, 1, 16, (16, 16), (2, 2), (1, 1), (1, 1), clip_text_pooled_in_channels=10,
        dropout=0.0,
    )  # fmt: skip


def _sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        16, 2, 4, 2, 8, 2, 12, 16, 10, out_channels=4, pos_embed_max_size=24
    )


def _flux() -> Any:
    return diffusers.FluxTransformer2DModel(1, 4, None, 1, 2, 8, 2, 12, 10, False, (2, 2, 4))


def _pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        2, 6, 4, 4, num_layers=2, cross_attention_dim=12, sample_size=16, caption_channels=10,
        use_additional_conditions=False,
    )  # fmt: skip


def _cogvideox() -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        2, 8, 4, 4, time_embed_dim=6, text_embed_dim=10, num_layers=2, sample_width=12,
        sample_height=16, sample_frames=5, max_text_seq_length=5,
    )  # fmt: skip


def _hunyuan_video() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        4, 4, 2, 8, 1, 1, 1, 2.0, guidance_embeds=False, text_embed_dim=10,
        pooled_projection_dim=6, rope_axes_dim=(2, 2, 4),
    )  # fmt: skip


def _lumina2() -> Any:
    return diffusers.Lumina2Transformer2DModel(
        16, 2, 4, None, 24, 2, 1, 3, 1, 8, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32),
        cap_feat_dim=10,
    )  # fmt: skip


CASES = {
    "unet_1d": Case(
        called(
            lambda: diffusers.UNet1DModel(
                64, extra_in_channels=64, block_out_channels=(32, 32, 64)
            ),
            step,
        ),
        [(1, 2, 32)],
    ),
    "unet_2d": Case(called(_unet_2d, step), [(1, 3, 18, 12)], (2, 3)),
    "unet_2d_condition": Case(called(_unet_2d_condition, step, text(1, 5, 12)), [(1, 4, 18, 12)],
        (2, 3)),
    "unet_2d_cross_attention": Case(
        called(
            lambda: _unet_2d_condition(only_cross_attention=True, use_linear_projection=True),
            step,
            text(1, 5, 12),
        ),
        [(1, 4, 18, 12)],
        (2, 3),
    ),
    "unet_3d_condition": Case(called(_unet_3d_condition, step, text(1, 5, 12)), [(1, 4, 3, 18, 12)],
        (3, 4)),
    "unet_spatio_temporal": Case(called(_unet_spatio_temporal, step, text(1, 1, 32), text(1, 3)),
        [(1, 2, 8, 16, 12)], (3, 4)),
    "unet_motion": Case(called(_unet_motion, step, text(3, 5, 12)), [(1, 4, 3, 16, 12)], (3, 4)),
    "controlnet": Case(lambda: Apply(lambda m, x,
        image: m(x, 7, text(1, 5, 12)(), image, return_dict=False)[0], _controlnet()),
        [(1, 4, 16, 12), (1, 3, 32, 24)], (2, 3)),
    "stable_cascade": Case(called(_stable_cascade, text(1), text(1, 1, 10)), [(1, 4, 16, 12)],
        (2, 3)),
    "dit": Case(called(lambda: diffusers.DiTTransformer2DModel(2, 6, 4, sample_size=16,
        patch_size=2, num_layers=2, norm_num_groups=2), step, lambda: torch.tensor([3])),
        [(1, 4, 16, 16)], (2, 3)),
    "pixart": Case(called(_pixart, text(1, 5, 10), step), [(1, 4, 16, 16)], (2, 3)),
    "sd3": Case(called(_sd3, text(1, 5, 12), text(1, 10), step), [(1, 4, 18, 12)], (2, 3)),
    "flux": Case(called(_flux, text(1, 5, 12), text(1, 10), text(1),
        img_ids=lambda: torch.cartesian_prod(*map(torch.arange, (1, 6, 4))).double(),
        txt_ids=zeros(5, 3)), [(1, 24, 4)], (1,), 1e-5),
    "sana": Case(
        called(
            lambda: diffusers.SanaTransformer2DModel(
                4, 4, 2, 6, 2, 2, 6, 12, 10, sample_size=16, patch_size=1
            ),
            text(1, 5, 10),
            step,
        ),
        [(1, 4, 16, 16)],
        (2, 3),
        1e-5,
    ),
    "lumina2": Case(called(_lumina2, step, text(1, 5, 10), ones(1, 5)), [(1, 4, 16, 12)], (2, 3),
        1e-5),
    "aura_flow": Case(
        called(
            lambda: diffusers.AuraFlowTransformer2DModel(16, 2, 4, 1, 1, 8, 2, 10, 16, 4, 96),
            text(1, 5, 10),
            step,
        ),
        [(1, 4, 16, 12)],
        (2, 3), 1e-5,
    ),
    "cogvideox": Case(called(_cogvideox, text(1, 5, 10), step), [(1, 2, 4, 16, 12)], (3, 4)),
    "wan": Case(
        called(
            lambda: diffusers.WanTransformer3DModel((1, 2, 2), 2, 12, 4, 4, 10, 8, 16, 2),
            step,
            text(1, 5, 10),
        ),
        [(1, 4, 3, 16, 12)],
        (3, 4),
        1e-5,
    ),
    "ltx": Case(
        called(
            lambda: diffusers.LTXVideoTransformer3DModel(
                4, 4, 1, 1, 2, 8, 16, num_layers=2, caption_channels=10
            ),
            text(1, 5, 10),
            step,
            ones(1, 5, dtype=torch.float32),
            num_frames=lambda: 2,
            height=lambda: 6,
            width=lambda: 4,
        ),
        [(1, 48, 4)],
        (1,), 1e-5,
    ),
    "hunyuan_video": Case(called(_hunyuan_video, step, text(1, 5, 10),
        ones(1, 5, dtype=torch.float32), text(1, 6)), [(1, 4, 3, 16, 12)], (3, 4), 1e-5),
    "mochi": Case(
        called(
            lambda: diffusers.MochiTransformer3DModel(2, 2, 8, 2, 6, 4, None, "rms_norm", 16, 8),
            text(1, 5, 16),
            step,
            ones(1, 5),
        ),
        [(1, 4, 3, 16, 12)],
        (3, 4),
        1e-5,
    ),
}  # fmt: skip
