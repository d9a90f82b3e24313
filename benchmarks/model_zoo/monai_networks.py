"""MONAI: volumetric segmentation networks."""

import torch
from monai.networks import nets
from monai.networks.nets import vista3d as vista

from benchmarks.model_zoo import Apply, Case, Float32


def timed(make):
    return lambda: Apply(lambda m, x: m(x, torch.tensor([3, 5])[: x.shape[0]]), make())


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
    "vista3d_classes": Case(lambda: Apply(lambda m, x: m(x, class_vector=CLASSES), vista3d()),
        [(1, 1, 24, 16, 16)], (2, 3, 4)),
    "vista3d_points": Case(lambda: Float32(lambda m, x: m(x, point_coords=POINTS.float(),
        point_labels=SIGNS, prompt_class=CLASSES), vista3d()), [(1, 1, 24, 16, 16)], (2, 3, 4),
        1e-4),
    "unet": Case(lambda: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
        [(1, 1, 32, 16, 20)], (2, 3, 4)),
    "unet_2d": Case(lambda: nets.UNet(2, 1, 2, (4, 8, 16), (2, 2)), [(2, 1, 44, 32)], (2, 3)),
    "basic_unet": Case(lambda: nets.BasicUNet(3, 1, 2, (4, 4, 8, 8, 8, 4)), [(1, 1, 33, 35, 48)],
        (2, 3, 4)),
    "basic_unet_plus_plus": Case(lambda: nets.BasicUNetPlusPlus(2, 1, 2, (4, 4, 8, 8, 8, 4)),
        [(2, 1, 48, 35)], (2, 3)),
    "attention_unet": Case(lambda: nets.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2)),
        [(2, 1, 44, 32)], (2, 3)),
    "segresnet": Case(lambda: nets.SegResNet(3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        [(1, 1, 24, 16, 12)], (2, 3, 4)),
    "segresnet_ds": Case(lambda: nets.SegResNetDS(3, 8, 1, 2, blocks_down=(1, 1, 1)),
        [(1, 1, 24, 16, 12)], (2, 3, 4)),
    "segresnet_vae": Case(lambda: nets.SegResNetVAE((16, 16, 16), 2, 8, spatial_dims=3,
        init_filters=8, in_channels=1, out_channels=2), [(1, 1, 16, 16, 16)], (2, 3, 4)),
    "dynunet": Case(lambda: nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16]),
        [(1, 1, 24, 16, 20)], (2, 3, 4)),
    "dynunet_ds": Case(lambda: nets.DynUNet(2, 1, 2, [3, 3, 3, 3], [1, 2, 2, 2], [2, 2, 2],
        filters=[4, 8, 16, 16], deep_supervision=True, res_block=True), [(2, 1, 48, 40)], (2, 3)),
    "vnet": Case(lambda: nets.VNet(3, 1, 2), [(1, 1, 32, 16, 16)], (2, 3, 4)),
    "unetr": Case(lambda: nets.UNETR(1, 2, (32, 16, 16), 8, 16, 32, 2), [(1, 1, 32, 16, 16)],
        (2, 3, 4)),
    "swin_unetr": Case(lambda: nets.SwinUNETR(1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        feature_size=12, spatial_dims=2, window_size=3), [(1, 1, 96, 64)], (2, 3)),
    "swin_unetr_3d": Case(lambda: nets.SwinUNETR(1, 2, depths=(2, 1, 1, 1), num_heads=(1, 1, 2, 2),
        feature_size=12, window_size=3, use_v2=True), [(1, 1, 64, 32, 32)], (2, 3, 4)),
    "highresnet": Case(lambda: nets.HighResNet(3, 1, 2), [(1, 1, 16, 9, 10)], (2, 3, 4)),
    "flexible_unet": Case(lambda: nets.FlexibleUNet(3, 2, "efficientnet-b0"), [(1, 3, 64, 96)],
        (2, 3)),
    "flexible_unet_resnet": Case(lambda: nets.FlexibleUNet(3, 2, "resnet18"), [(1, 3, 64, 96)],
        (2, 3)),
    "densenet121": Case(lambda: nets.DenseNet121(2, 1, 3), [(2, 1, 64, 67)], (2, 3)),
    "autoencoder": Case(lambda: nets.AutoEncoder(2, 1, 1, (4, 8), (2, 2)), [(2, 1, 24, 16)],
        (2, 3)),
    "vit": Case(lambda: nets.ViT(1, (16, 16, 16), (8, 8, 8), 16, 32, 1, 2, classification=True),
        [(1, 1, 16, 16, 16)], (2, 3, 4)),
    "vit_autoenc": Case(
        lambda: nets.ViTAutoEnc(1, (16, 16), (4, 4), 1, 16, 16, 32, 1, 2, spatial_dims=2),
        [(2, 1, 16, 16)],
        (2, 3),
    ),
    "diffusion_unet": Case(timed(lambda: nets.DiffusionModelUNet(2, 1, 1, (1, 1), (8, 8),
        (False, True), norm_num_groups=4, num_head_channels=4)), [(2, 1, 24, 14)], (2, 3)),
    "diffusion_unet_3d": Case(timed(lambda: nets.DiffusionModelUNet(3, 1, 1, (1, 1), (8, 8),
        (False, True), norm_num_groups=4, num_head_channels=4, resblock_updown=True)),
        [(1, 1, 12, 8, 8)], (2, 3)),
    "autoencoder_kl": Case(lambda: Apply(lambda m, x: m.reconstruct(x),
        nets.AutoencoderKL(2, 1, 1, (1, 1), (8, 8), (False, True), norm_num_groups=4)),
        [(2, 1, 24, 14)], (2, 3)),
    "resnet10": Case(lambda: nets.ResNet("basic", [1, 1, 1, 1], [4, 8, 16, 16], n_input_channels=1,
        num_classes=3), [(2, 1, 40, 33, 32)], (2, 3, 4)),
    "seresnet50": Case(lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=3),
        [(2, 1, 64, 67)], (2, 3)),
    "efficientnet": Case(lambda: nets.EfficientNetBN("efficientnet-b0", pretrained=False,
        spatial_dims=2, in_channels=1, num_classes=3), [(2, 1, 64, 67)], (2, 3)),
    "ahnet": Case(lambda: nets.AHNet(spatial_dims=2, in_channels=1, out_channels=2),
        [(2, 1, 128, 64)], (2, 3)),
    "mednext_3d": Case(lambda: nets.MedNeXt(3, 4, 1, 2, encoder_expansion_ratio=2,
        decoder_expansion_ratio=2, bottleneck_expansion_ratio=2, kernel_size=3,
        blocks_down=(1, 1, 1, 1), blocks_up=(1, 1, 1, 1), blocks_bottleneck=1),
        [(1, 1, 32, 16, 32)], (2, 3)),
    "voxelmorph": Case(lambda: nets.VoxelMorph(), [(1, 1, 32, 16, 16), (1, 1, 32, 16, 16)], (2, 3)),
    "regunet": Case(
        lambda: nets.RegUNet(3, 1, 4, 2, out_channels=3, out_kernel_initializer="zeros"),
        [(1, 1, 24, 16, 16)],
        (2, 3),
    ),
    "localnet": Case(lambda: nets.LocalNet(3, 1, 4, (0, 1, 2), out_channels=3),
        [(1, 1, 24, 16, 16)], (2, 3)),
    "quicknat": Case(lambda: nets.Quicknat(num_classes=3, num_filters=4), [(2, 1, 64, 32)], (2, 3)),
    "spade": Case(lambda: Apply(lambda m, s, x: m(s, x),
        nets.SPADENet(2, 1, 1, 2, [32, 32], [8, 8], 4, False)), [(1, 2, 32, 32), (1, 1, 32, 32)],
        (2, 3)),
    "discriminator": Case(lambda: nets.PatchDiscriminator(2, 4, 1), [(2, 1, 65, 48)], (2, 3)),
}  # fmt: skip
