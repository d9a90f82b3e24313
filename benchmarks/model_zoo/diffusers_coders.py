"""diffusers: coders between images, or videos and latents, there and back."""

import diffusers as d

from benchmarks.model_zoo import row

DOWN, UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
IMAGE, VIDEO = (1, 3, 20, 12), (1, 3, 5, 16, 12)
BLOCKS, SCALES = ("ResBlock", "EfficientViTBlock"), ((), (5,))
GROUPS = {"norm_num_groups": 4}
VAE = (3, 3, DOWN, UP, (8, 16), 1, "silu", 4, 4)
WAN = {
    "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip


def coder(kind, *arguments, on=IMAGE, within=1e-10, given=None, **options):
    """Encodes, takes the mean of the latents where they have a distribution, and decodes."""

    def run(model, x):
        latents = model.encode(x)
        kept = latents.latent_dist.mode() if hasattr(latents, "latent_dist") else latents[0]
        return model.decode(kept, **given or {}).sample

    split = (2, 3) if len(on) == 4 else (3, 4)
    return row(kind, *arguments, **options, on=on, split=split, within=within, run=run)


CASES = {
    "vae": coder(d.AutoencoderKL, *VAE),
    "vae_without_attention": coder(d.AutoencoderKL, *VAE, mid_block_add_attention=False),
    "vae_asymmetric": coder(d.AsymmetricAutoencoderKL, 3, 3, DOWN, (8, 16), 1, UP, (8, 16), 1,
        **GROUPS),
    "vae_tiny": coder(d.AutoencoderTiny, 3, 3, (8, 8), (8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1)),
    # its linear attention divides in float32 by sums that may be small
    "vae_dc": coder(d.AutoencoderDC, 3, 4, 8, BLOCKS, BLOCKS, (8, 16), (8, 16), (1, 1), (1, 1),
        SCALES, SCALES, on=(1, 3, 24, 16), within=1e-4),
    "vae_temporal": coder(d.AutoencoderKLTemporalDecoder, down_block_types=DOWN,
        block_out_channels=(32, 64), latent_channels=4, given={"num_frames": 2},
        on=(2, 3, 16, 12)),
    "vq": row(d.VQModel, 3, 3, DOWN, UP, (8, 16), **GROUPS, num_vq_embeddings=16, on=IMAGE,
        run=lambda m, x: m(x).sample),
    "vae_cogvideox": coder(d.AutoencoderKLCogVideoX, 3, 3, ("CogVideoXDownBlock3D",) * 2,
        ("CogVideoXUpBlock3D",) * 2, (8, 16), 4, 1, **GROUPS, temporal_compression_ratio=2,
        on=VIDEO),
    "vae_wan": coder(d.AutoencoderKLWan, 8, **WAN, on=VIDEO, within=1e-5),
    "vae_qwen_image": coder(d.AutoencoderKLQwenImage, 8, **WAN, on=VIDEO, within=1e-5),
    "vae_hunyuan_video": coder(d.AutoencoderKLHunyuanVideo, 3, 3, 4,
        ("HunyuanVideoDownBlock3D",) * 3, ("HunyuanVideoUpBlock3D",) * 3, (8, 8, 16), 1, **GROUPS,
        spatial_compression_ratio=4, on=VIDEO),
    "vae_ltx": coder(d.AutoencoderKLLTXVideo, 3, 3, 4, (8, 16), ("LTXVideoDownBlock3D",) * 2,
        (8, 16), (1, 1, 1), (1, 1, 1), (True, False), (True, False), (False,) * 3, ("conv",) * 2,
        (False,) * 2, (1, 1), patch_size=2, on=(1, 3, 5, 16, 16), within=1e-5),
    "vae_mochi": coder(d.AutoencoderKLMochi, 15, 3, (32,) * 4, (32,) * 4, 4, (1, 1, 1, 1, 1),
        latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4, on=(1, 3, 7, 16, 16), within=1e-5),
    "vae_magvit": coder(d.AutoencoderKLMagvit, 3, 4, 3, (8, 16),
        ("SpatialDownBlock3D", "SpatialTemporalDownBlock3D"),
        ("SpatialUpBlock3D", "SpatialTemporalUpBlock3D"), 1, **GROUPS, on=VIDEO),
}  # fmt: skip
