"""transformers: images and videos, of small configurations."""

import torch
import transformers as tf

from benchmarks.model_zoo import row
from benchmarks.model_zoo.transformers_sequence import FLOAT32, HEADS, SIZE, built

SQUARE, OTHER, LARGE, SLICE = (2, 3, 32, 32), (2, 3, 40, 32), (2, 3, 70, 64), (1, 3, 32, 32)
SINGLE = {"depths": [1, 1, 1, 1]}
STAGES = SINGLE | {"hidden_sizes": [8, 8, 16, 16]}
EIGHTS = SINGLE | {"hidden_sizes": [8, 8, 8, 8]}
ATTENTION = {"num_attention_heads": [1, 1, 2, 2]}
OUT = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
VIT = SIZE | HEADS | {"image_size": 32, "patch_size": 8}
SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 8, "window_size": 4, "depths": [2, 2],
    "num_heads": [2, 2],
}  # fmt: skip
FUSION = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
FOUR_LAYERS = {"num_hidden_layers": 4}
CONVNEXT = tf.ConvNextConfig(**STAGES, **OUT)
DEEP_SWIN = tf.SwinConfig(**SWIN | SINGLE | {"num_heads": [1, 1, 2, 2]}, **OUT)
DEEP_DINO = tf.Dinov2Config(
    **VIT | FOUR_LAYERS | {"image_size": 28, "patch_size": 7}, out_indices=[1, 2, 3, 4],
    apply_layernorm=True, reshape_hidden_states=False,
)  # fmt: skip
MASKS = torch.arange(2 * 64 * 70).reshape(2, 64, 70) % 3
SEGFORMER = STAGES | ATTENTION | {"decoder_hidden_size": 8, "num_labels": 3}


def images(model, *, on=SQUARE, within=1e-10, call=None, **options):
    split = (2, 3) if len(on) == 4 else (3, 4, 1)

    def run(m, x):
        return m(pixel_values=x, **call or {})

    return row(built, model, **options, on=on, split=split, within=within, run=run)


def videos(model):
    return images(model, **VIT, num_frames=4, on=(1, 4, 3, 32, 32))


CASES = {
    "vit": images(tf.ViTModel, **VIT),
    "vit_interpolated": images(tf.ViTModel, **VIT, on=(2, 3, 48, 40),
        call={"interpolate_pos_encoding": True}),
    "deit": images(tf.DeiTModel, **VIT),
    "beit": images(tf.BeitModel, **VIT, use_relative_position_bias=True),
    "dinov2": images(tf.Dinov2Model, **VIT, on=OTHER, within=FLOAT32),
    "dinov3": images(tf.DINOv3ViTModel, **VIT, on=OTHER, within=FLOAT32),
    "vitmae": images(tf.ViTMAEForPreTraining, **VIT, decoder_num_attention_heads=2,
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_intermediate_size=16,
        call={"noise": torch.arange(32.0).reshape(2, 16)}),
    "clip_vision": images(tf.CLIPVisionModel, **VIT),
    "siglip_vision": images(tf.SiglipVisionModel, **VIT),
    "swin": images(tf.SwinModel, **SWIN),
    "swinv2": images(tf.Swinv2Model, **SWIN),
    "swin2sr": images(tf.Swin2SRForImageSuperResolution, image_size=16, patch_size=1,
        num_channels=3, embed_dim=8, depths=[2], num_heads=[2], window_size=4, upscale=2,
        on=(1, 3, 16, 16)),
    "segformer": images(tf.SegformerForSemanticSegmentation, **SEGFORMER, on=LARGE),
    "segformer_loss": row(built, tf.SegformerForSemanticSegmentation, **SEGFORMER,
        on=(2, 3, 64, 70), run=lambda m, x: m(pixel_values=x, labels=MASKS).loss),
    "convnext": images(tf.ConvNextForImageClassification, **STAGES, num_labels=3, on=LARGE),
    "convnextv2": images(tf.ConvNextV2ForImageClassification, **STAGES, num_labels=3, on=LARGE),
    "resnet": images(tf.ResNetModel, **STAGES, embedding_size=8, layer_type="basic", on=LARGE),
    "regnet": images(tf.RegNetModel, **STAGES, embedding_size=8, groups_width=8, on=LARGE),
    "mobilenet_v2": images(tf.MobileNetV2Model, depth_multiplier=0.35, on=LARGE),
    "mobilevit": images(tf.MobileViTModel, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8] * 7,
        on=(2, 3, 96, 64)),
    "poolformer": images(tf.PoolFormerModel, **EIGHTS, on=LARGE),
    "pvt": images(tf.PvtModel, **EIGHTS, **ATTENTION, image_size=64, on=(2, 3, 64, 64)),
    "focalnet": images(tf.FocalNetModel, image_size=64, embed_dim=8, depths=[1, 1],
        focal_levels=[2, 2], focal_windows=[3, 3], on=(2, 3, 64, 64)),
    "cvt": images(tf.CvtModel, drop_path_rate=[0.0, 0.0, 0.0], embed_dim=[8, 8, 8],
        num_heads=[1, 1, 2], depth=[1, 2, 3], on=LARGE),
    "levit": images(tf.LevitModel, image_size=64, hidden_sizes=[8, 8, 8],
        num_attention_heads=[1, 1, 2], depths=[1, 1, 1], key_dim=[4, 4, 4], on=(2, 3, 64, 64)),
    "upernet": images(tf.UperNetForSemanticSegmentation, backbone_config=CONVNEXT, hidden_size=8,
        num_labels=3, auxiliary_in_channels=16, auxiliary_channels=8, on=LARGE),
    "dpt": images(tf.DPTForSemanticSegmentation, **VIT | FOUR_LAYERS, **FUSION, num_labels=3,
        backbone_out_indices=[0, 1, 2, 3], reassemble_factors=[4, 2, 1, 0.5]),
    "glpn": images(tf.GLPNForDepthEstimation, **STAGES, **ATTENTION, decoder_hidden_size=8,
        on=(2, 3, 64, 96)),
    "depth_anything": images(tf.DepthAnythingForDepthEstimation, backbone_config=DEEP_DINO,
        **FUSION, patch_size=7, reassemble_hidden_size=16, head_hidden_size=4, on=(1, 3, 35, 28),
        within=FLOAT32),
    "mask2former": images(tf.Mask2FormerForUniversalSegmentation, backbone_config=DEEP_SWIN,
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=1, num_attention_heads=2,
        num_queries=5, on=SLICE),
    "mobilevit_v2": images(tf.MobileViTV2Model, width_multiplier=0.25, on=(2, 3, 96, 64)),
    "vitdet": images(tf.VitDetModel, **VIT, window_size=2, window_block_indices=[0],
        use_relative_position_embeddings=True, on=SLICE),
    "timesformer": videos(tf.TimesformerModel),
    "videomae": videos(tf.VideoMAEModel),
    "sam_vision": images(tf.SamVisionModel, **SIZE, num_attention_heads=2, mlp_dim=32,
        image_size=32, patch_size=4, window_size=3, global_attn_indexes=[1], output_channels=8,
        on=SLICE),
}  # fmt: skip
