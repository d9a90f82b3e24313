"""transformers: images and videos, of small configurations."""

import torch
import transformers as tf

from benchmarks.model_zoo import Apply, Case

BASE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
VIDEO = (1, 4, 3, 32, 32)
FLOAT32 = 1e-5  # norms, softmax or rotations are computed in float32


def of_images(model, config, shape=(2, 3, 32, 32), tolerance=1e-10, **arguments):
    return Case(
        lambda: Apply(lambda m, x: m(pixel_values=x, **arguments), model(config())), [shape],
        (2, 3) if len(shape) == 4 else (3, 4, 1), tolerance,
    )  # fmt: skip


def image(kind, **options):
    return lambda: kind(**(BASE | {"image_size": 32, "patch_size": 8} | options))


def swin(kind=tf.SwinConfig, **options):
    shared = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    shared |= {"depths": [2, 2], "num_heads": [2, 2]}
    return lambda: kind(**(shared | options))


def segformer():
    return tf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip


def convnext(kind):
    return lambda: kind(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=3)


def resnet():
    return tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic"
    )


def upernet():
    return tf.UperNetConfig(
        backbone_config=tf.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"]), hidden_size=8, num_labels=3,
        auxiliary_in_channels=16, auxiliary_channels=8,
    )  # fmt: skip


def dpt():
    return tf.DPTConfig(
        **(BASE | {"num_hidden_layers": 4}), image_size=32, patch_size=8,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5], num_labels=3,
    )  # fmt: skip


def glpn():
    return tf.GLPNConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
    )  # fmt: skip


def mask2former():
    return tf.Mask2FormerConfig(
        backbone_config=swin(depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2],
        out_features=["stage1", "stage2", "stage3", "stage4"])(), feature_size=32,
        mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16, dim_feedforward=16,
        encoder_layers=1, decoder_layers=1, num_attention_heads=2, num_queries=5,
    )  # fmt: skip


def clip_vision():
    return tf.CLIPVisionConfig(**BASE, image_size=32, patch_size=8)


def vitmae():
    return tf.ViTMAEConfig(
        **BASE, image_size=32, patch_size=8, decoder_num_attention_heads=2, decoder_hidden_size=16,
        decoder_num_hidden_layers=1, decoder_intermediate_size=16,
    )  # fmt: skip


def video(kind):
    return lambda: kind(**BASE, image_size=32, patch_size=8, num_frames=4)


CASES = {
    "vit": of_images(tf.ViTModel, image(tf.ViTConfig)),
    "vit_interpolated": of_images(tf.ViTModel, image(tf.ViTConfig), (2, 3, 48, 40),
        interpolate_pos_encoding=True),
    "deit": of_images(tf.DeiTModel, image(tf.DeiTConfig)),
    "beit": of_images(tf.BeitModel, image(tf.BeitConfig, use_relative_position_bias=True)),
    "dinov2": of_images(tf.Dinov2Model, image(tf.Dinov2Config), (2, 3, 40, 32), FLOAT32),
    "dinov3": of_images(tf.DINOv3ViTModel, image(tf.DINOv3ViTConfig), (2, 3, 40, 32), FLOAT32),
    "vitmae": of_images(tf.ViTMAEForPreTraining, vitmae, noise=torch.arange(32.0).reshape(2, 16)),
    "clip_vision": of_images(tf.CLIPVisionModel, clip_vision),
    "siglip_vision": of_images(tf.SiglipVisionModel, image(tf.SiglipVisionConfig)),
    "swin": of_images(tf.SwinModel, swin()),
    "swinv2": of_images(tf.Swinv2Model, swin(tf.Swinv2Config)),
    "swin2sr": of_images(tf.Swin2SRForImageSuperResolution, lambda: tf.Swin2SRConfig(image_size=16,
        patch_size=1, num_channels=3, embed_dim=8, depths=[2], num_heads=[2], window_size=4,
        upscale=2), (1, 3, 16, 16)),
    "segformer": of_images(tf.SegformerForSemanticSegmentation, segformer, (2, 3, 70, 64)),
    "segformer_loss": Case(lambda: Apply(lambda m, x: (m(pixel_values=x,
        labels=torch.arange(2 * 64 * 70).reshape(2, 64, 70) % 3).loss),
        tf.SegformerForSemanticSegmentation(segformer())), [(2, 3, 64, 70)], (2, 3)),
    "convnext": of_images(tf.ConvNextForImageClassification, convnext(tf.ConvNextConfig),
        (2, 3, 70, 64)),
    "convnextv2": of_images(tf.ConvNextV2ForImageClassification, convnext(tf.ConvNextV2Config),
        (2, 3, 70, 64)),
    "resnet": of_images(tf.ResNetModel, resnet, (2, 3, 70, 64)),
    "regnet": of_images(tf.RegNetModel, lambda: tf.RegNetConfig(embedding_size=8,
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], groups_width=8), (2, 3, 70, 64)),
    "mobilenet_v2": of_images(tf.MobileNetV2Model,
        lambda: tf.MobileNetV2Config(depth_multiplier=0.35), (2, 3, 70, 64)),
    "mobilevit": of_images(tf.MobileViTModel, lambda: tf.MobileViTConfig(hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 8]), (2, 3, 96, 64)),
    "poolformer": of_images(tf.PoolFormerModel,
        lambda: tf.PoolFormerConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]),
        (2, 3, 70, 64)),
    "pvt": of_images(tf.PvtModel, lambda: tf.PvtConfig(image_size=64, hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2]), (2, 3, 64, 64)),
    "focalnet": of_images(tf.FocalNetModel, lambda: tf.FocalNetConfig(image_size=64, embed_dim=8,
        depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3]), (2, 3, 64, 64)),
    "cvt": of_images(tf.CvtModel, lambda: tf.CvtConfig(drop_path_rate=[0.0, 0.0, 0.0],
        embed_dim=[8, 8, 8], num_heads=[1, 1, 2], depth=[1, 2, 3]), (2, 3, 70, 64)),
    "levit": of_images(tf.LevitModel, lambda: tf.LevitConfig(image_size=64, hidden_sizes=[8, 8, 8],
        num_attention_heads=[1, 1, 2], depths=[1, 1, 1], key_dim=[4, 4, 4]), (2, 3, 64, 64)),
    "upernet": of_images(tf.UperNetForSemanticSegmentation, upernet, (2, 3, 70, 64)),
    "dpt": of_images(tf.DPTForSemanticSegmentation, dpt),
    "glpn": of_images(tf.GLPNForDepthEstimation, glpn, (2, 3, 64, 96)),
    "depth_anything": of_images(
        tf.DepthAnythingForDepthEstimation,
        lambda: tf.DepthAnythingConfig(
            backbone_config=tf.Dinov2Config(
                **(BASE | {"num_hidden_layers": 4}),
                image_size=28,
                patch_size=7,
                out_indices=[1, 2, 3, 4],
                apply_layernorm=True,
                reshape_hidden_states=False,
            ),
            patch_size=7,
            neck_hidden_sizes=[8, 8, 8, 8],
            fusion_hidden_size=8,
            reassemble_hidden_size=16,
            head_hidden_size=4,
        ),
        (1, 3, 35, 28),
        FLOAT32,
    ),
    "mask2former": of_images(tf.Mask2FormerForUniversalSegmentation, mask2former, (1, 3, 32, 32)),
    "mobilevit_v2": of_images(tf.MobileViTV2Model,
        lambda: tf.MobileViTV2Config(width_multiplier=0.25), (2, 3, 96, 64)),
    "vitdet": of_images(tf.VitDetModel, image(tf.VitDetConfig, window_size=2,
        window_block_indices=[0], use_relative_position_embeddings=True), (1, 3, 32, 32)),
    "timesformer": of_images(tf.TimesformerModel, video(tf.TimesformerConfig), VIDEO),
    "videomae": of_images(tf.VideoMAEModel, video(tf.VideoMAEConfig), VIDEO),
    "sam_vision": of_images(tf.SamVisionModel, lambda: tf.SamVisionConfig(hidden_size=16,
        num_hidden_layers=2, num_attention_heads=2, mlp_dim=32, image_size=32, patch_size=4,
        window_size=3, global_attn_indexes=[1], output_channels=8), (1, 3, 32, 32)),
}  # fmt: skip
