"""diffusers: coders between images, or videos and latents, there and back."""

from collections.abc import Callable
from typing import Any

import diffusers
from torch import Tensor

from benchmarks.model_zoo import Apply, Case


def coder(make: Callable[[], Any], **given: Any) -> Callable[[], Apply]:
    """Encodes, takes the mean of the latents where they have a distribution, and decodes."""

    def run(model: Any, x: Tensor) -> Tensor:
        latents = model.encode(x)
        kept = latents.latent_dist.mode() if hasattr(latents, "latent_dist") else latents[0]
        return model.decode(kept, **given).sample

    return lambda: Apply(run, make())


DOWN, UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
IMAGE, VIDEO = [(1, 3, 20, 12)], [(1, 3, 5, 16, 12)]


def _vae(**more: Any) -> Any:
    return diffusers.AutoencoderKL(3, 3, DOWN, UP, (8, 16), 1, "silu", 4, 4, **more)


def _asymmetric() -> Any:
    return diffusers.AsymmetricAutoencoderKL(
        3, 3, DOWN, (8, 16), 1, UP, (8, 16), 1, norm_num_groups=4
    )


def _tiny() -> Any:
    return diffusers.AutoencoderTiny(
        3, 3, (8, 8), (8, 8), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)
    )


def _dc() -> Any:
    blocks, scales = ("ResBlock", "EfficientViTBlock"), ((), (5,))
    return diffusers.AutoencoderDC(
        3, 4, 8, blocks, blocks, (8, 16), (8, 16), (1, 1), (1, 1), scales, scales
    )


def _temporal() -> Any:
    return diffusers.AutoencoderKLTemporalDecoder(
        down_block_types=DOWN, block_out_channels=(32, 64), latent_channels=4
    )


def _cogvideox() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        3, 3, ("CogVideoXDownBlock3D",) * 2, ("CogVideoXUpBlock3D",) * 2, (8, 16), 4, 1,
        norm_num_groups=4, temporal_compression_ratio=2,
    )  # fmt: skip


def _wan(kind: Any = diffusers.AutoencoderKLWan, **more: Any) -> Any:
    return kind(
        8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4, **more,
    )  # fmt: skip


def _hunyuan() -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        3, 3, 4, ("HunyuanVideoDownBlock3D",) * 3, ("HunyuanVideoUpBlock3D",) * 3, (8, 8, 16), 1,
        norm_num_groups=4, spatial_compression_ratio=4,
    )  # fmt: skip


def _ltx() -> Any:
    return diffusers.AutoencoderKLLTXVideo(
        3, 3, 4, (8, 16), ("LTXVideoDownBlock3D",) * 2, (8, 16), (1, 1, 1), (1, 1, 1),
        (True, False), (True, False), (False,) * 3, ("conv",) * 2, (False,) * 2, (1, 1),
        patch_size=2,
    )  # fmt: skip


def _mochi() -> Any:
    return diffusers.AutoencoderKLMochi(
        15, 3, (32,) * 4, (32,) * 4, 4, (1, 1, 1, 1, 1), latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    )  # fmt: skip


def _magvit() -> Any:
    return diffusers.AutoencoderKLMagvit(
        3, 4, 3, (8, 16), ("SpatialDownBlock3D", "SpatialTemporalDownBlock3D"),
        ("SpatialUpBlock3D", "SpatialTemporalUpBlock3D"), 1, norm_num_groups=4,
    )  # fmt: skip


def _quantized(model: Any, x: Tensor) -> Tensor:
    return model(x).sample


CASES = {
    "vae": Case(coder(_vae), IMAGE, (2, 3)),
    "vae_without_attention": Case(coder(lambda: _vae(mid_block_add_attention=False)), IMAGE,
        (2, 3)),
    "vae_asymmetric": Case(coder(_asymmetric), IMAGE, (2, 3)),
    "vae_tiny": Case(coder(_tiny), IMAGE, (2, 3)),
    # its linear attention divides in float32 by sums that may be small
    "vae_dc": Case(coder(_dc), [(1, 3, 24, 16)], (2, 3), 1e-4),
    "vae_temporal": Case(coder(_temporal, num_frames=2), [(2, 3, 16, 12)], (2, 3)),
    "vq": Case(lambda: Apply(_quantized, diffusers.VQModel(3, 3, DOWN, UP, (8, 16),
        norm_num_groups=4, num_vq_embeddings=16)), IMAGE, (2, 3)),
    "vae_cogvideox": Case(coder(_cogvideox), VIDEO, (3, 4)),
    "vae_wan": Case(coder(_wan), VIDEO, (3, 4), 1e-5),
    "vae_qwen_image": Case(coder(lambda: _wan(diffusers.AutoencoderKLQwenImage)), VIDEO, (3, 4),
        1e-5),
    "vae_hunyuan_video": Case(coder(_hunyuan), VIDEO, (3, 4)),
    "vae_ltx": Case(coder(_ltx), [(1, 3, 5, 16, 16)], (3, 4), 1e-5),
    "vae_mochi": Case(coder(_mochi), [(1, 3, 7, 16, 16)], (3, 4), 1e-5),
    "vae_magvit": Case(coder(_magvit), VIDEO, (3, 4)),
}  # fmt: skip
