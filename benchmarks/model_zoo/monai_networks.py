"""MONAI: volumetric segmentation networks."""

import torch
from monai.networks import nets
from monai.networks.nets import vista3d as vista

from benchmarks.model_zoo import Float32, row


def timed(model, x):
    return model(x, torch.tensor([3, 5])[: x.shape[0]])


def vista3d():
    """Its network of four levels, with fewer channels and classes."""
    encoder = vista.SegResNetDS2(
        in_channels=1, blocks_down=(1, 1, 1), norm="instance", out_channels=8, init_filters=8,
        dsdepth=1,
    )  # fmt: skip
    points = vista.PointMappingSAM(feature_size=8, n_classes=6, last_supported=4)
    for layer in (*points.feat_downsample, points.output_upscaling[0]):
        if hasattr(layer, "kernel_size"):  # before a norm: a gradient of zero but for rounding
            layer.bias.requires_grad_(False)
    classes = vista.ClassMappingClassify(n_classes=6, feature_size=8, use_mlp=True)
    return vista.VISTA3D(encoder, classes, points)


POINTS = torch.tensor([[[3, 5, 7], [12, 9, 2]], [[20, 1, 3], [8, 8, 8]]])
SIGNS = torch.tensor([[1, 0], [1, -1]])
CLASSES = torch.tensor([[2], [3]])


CASES = {
    "vista3d_classes": row(vista3d, on=(1, 1, 24, 16, 16),
        run=lambda m, x: m(x, class_vector=CLASSES)),
    "vista3d_points": row(vista3d, on=(1, 1, 24, 16, 16), within=1e-4, run=lambda m, x: m(x,
        point_coords=POINTS.float(), point_labels=SIGNS, prompt_class=CLASSES), wrap=Float32),
    "unet": row(nets.UNet, 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, on=(1, 1, 32, 16, 20)),
    "unet_2d": row(nets.UNet, 2, 1, 2, (4, 8, 16), (2, 2), on=(2, 1, 44, 32)),
    "basic_unet": row(nets.BasicUNet, 3, 1, 2, (4, 4, 8, 8, 8, 4), on=(1, 1, 33, 35, 48)),
    "basic_unet_plus_plus": row(nets.BasicUNetPlusPlus, 2, 1, 2, (4, 4, 8, 8, 8, 4),
        on=(2, 1, 48, 35)),
    "attention_unet": row(nets.AttentionUnet, 2, 1, 2, (4, 8, 16), (2, 2), on=(2, 1, 44, 32)),
    "segresnet": row(nets.SegResNet, 3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1),
        on=(1, 1, 24, 16, 12)),
    "segresnet_ds": row(nets.SegResNetDS, 3, 8, 1, 2, blocks_down=(1, 1, 1), on=(1, 1, 24, 16, 12)),
    "segresnet_vae": row(nets.SegResNetVAE, (16, 16, 16), 2, 8, spatial_dims=3, init_filters=8,
        in_channels=1, out_channels=2, on=(1, 1, 16, 16, 16)),
    "dynunet": row(nets.DynUNet, 3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16],
        on=(1, 1, 24, 16, 20)),
    "dynunet_ds": row(nets.DynUNet, 2, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2],
        filters=[4, 8, 16, 16], deep_supervision=True, res_block=True, on=(2, 1, 48, 40)),
    "vnet": row(nets.VNet, 3, 1, 2, on=(1, 1, 32, 16, 16)),
    "unetr": row(nets.UNETR, 1, 2, (32, 16, 16), 8, 16, 32, 2, on=(1, 1, 32, 16, 16)),
    "swin_unetr": row(nets.SwinUNETR, 1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        feature_size=12, spatial_dims=2, window_size=3, on=(1, 1, 96, 64)),
    "swin_unetr_3d": row(nets.SwinUNETR, 1, 2, depths=(2, 1, 1, 1), num_heads=(1, 1, 2, 2),
        feature_size=12, window_size=3, use_v2=True, on=(1, 1, 64, 32, 32)),
    "highresnet": row(nets.HighResNet, 3, 1, 2, on=(1, 1, 16, 9, 10)),
    "flexible_unet": row(nets.FlexibleUNet, 3, 2, "efficientnet-b0", on=(1, 3, 64, 96)),
    "flexible_unet_resnet": row(nets.FlexibleUNet, 3, 2, "resnet18", on=(1, 3, 64, 96)),
    "densenet121": row(nets.DenseNet121, 2, 1, 3, on=(2, 1, 64, 67)),
    "autoencoder": row(nets.AutoEncoder, 2, 1, 1, (4, 8), (2, 2), on=(2, 1, 24, 16)),
    "vit": row(nets.ViT, 1, (16, 16, 16), (8, 8, 8), 16, 32, 1, 2, classification=True,
        on=(1, 1, 16, 16, 16)),
    "vit_autoenc": row(nets.ViTAutoEnc, 1, (16, 16), (4, 4), 1, 16, 16, 32, 1, 2, spatial_dims=2,
        on=(2, 1, 16, 16)),
    "diffusion_unet": row(nets.DiffusionModelUNet, 2, 1, 1, (1, 1), (8, 8), (False, True),
        norm_num_groups=4, num_head_channels=4, on=(2, 1, 24, 14), run=timed),
    "diffusion_unet_3d": row(nets.DiffusionModelUNet, 3, 1, 1, (1, 1), (8, 8), (False, True),
        norm_num_groups=4, num_head_channels=4, resblock_updown=True, on=(1, 1, 12, 8, 8),
        split=(2, 3), run=timed),
    "autoencoder_kl": row(nets.AutoencoderKL, 2, 1, 1, (1, 1), (8, 8), (False, True),
        norm_num_groups=4, on=(2, 1, 24, 14), run=lambda m, x: m.reconstruct(x)),
    "resnet10": row(nets.ResNet, "basic", [1, 1, 1, 1], [4, 8, 16, 16], n_input_channels=1,
        num_classes=3, on=(2, 1, 40, 33, 32)),
    "seresnet50": row(nets.SEResNet50, spatial_dims=2, in_channels=1, num_classes=3,
        on=(2, 1, 64, 67)),
    "efficientnet": row(nets.EfficientNetBN, "efficientnet-b0", pretrained=False, spatial_dims=2,
        in_channels=1, num_classes=3, on=(2, 1, 64, 67)),
    "ahnet": row(nets.AHNet, spatial_dims=2, in_channels=1, out_channels=2, on=(2, 1, 128, 64)),
    "mednext_3d": row(nets.MedNeXt, 3, 4, 1, 2, encoder_expansion_ratio=2,
        decoder_expansion_ratio=2, bottleneck_expansion_ratio=2, kernel_size=3,
        blocks_down=(1, 1, 1, 1), blocks_up=(1, 1, 1, 1), blocks_bottleneck=1,
        on=(1, 1, 32, 16, 32), split=(2, 3)),
    "voxelmorph": row(nets.VoxelMorph, on=[(1, 1, 32, 16, 16), (1, 1, 32, 16, 16)], split=(2, 3)),
    "regunet": row(nets.RegUNet, 3, 1, 4, 2, out_channels=3, out_kernel_initializer="zeros",
        on=(1, 1, 24, 16, 16), split=(2, 3)),
    "localnet": row(nets.LocalNet, 3, 1, 4, (0, 1, 2), out_channels=3, on=(1, 1, 24, 16, 16),
        split=(2, 3)),
    "quicknat": row(nets.Quicknat, num_classes=3, num_filters=4, on=(2, 1, 64, 32)),
    "spade": row(nets.SPADENet, 2, 1, 1, 2, [32, 32], [8, 8], 4, False,
        on=[(1, 2, 32, 32), (1, 1, 32, 32)], run=lambda m, s, x: m(s, x)),
    "discriminator": row(nets.PatchDiscriminator, 2, 4, 1, on=(2, 1, 65, 48)),
}  # fmt: skip
