"""torchvision: classification, segmentation, video and optical flow."""

import torchvision.models as tv

from benchmarks.model_zoo import Case

IMAGE = (2, 3, 97, 70)


def named(name, **options):
    return lambda: tv.get_model(name, weights=None, num_classes=5, **options)


def segmentation(name):
    return lambda: tv.get_model(name, weights=None, weights_backbone=None, num_classes=3)


def swin(block=None):
    from torchvision.models import swin_transformer as s

    extra = (
        {"block": s.SwinTransformerBlockV2, "downsample_layer": s.PatchMergingV2} if block else {}
    )
    return s.SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [3, 3], num_classes=5, stochastic_depth_prob=0.0, **extra
    )


def swin3d():
    from torchvision.models.video import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 8, [2, 2], [2, 2], [2, 3, 3], num_classes=5)


def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 2)]
    return ConvNeXt(settings, num_classes=5)


def mvit(new):
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    return MViT(
        (32, 32), 8, blocks, residual_pool=new, residual_with_cls_embed=not new, rel_pos_embed=new,
        proj_after_attn=new, num_classes=5,
    )  # fmt: skip


def maxvit():
    return tv.MaxVit((56, 56), 8, 7, [8, 16], [1, 2], 8, 0.0, num_classes=5)


def vit():
    return tv.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)


CASES = {
    name: Case(named(name), [IMAGE], (2, 3))
    for name in (
        "alexnet densenet121 efficientnet_b0 efficientnet_v2_s mnasnet0_5 mobilenet_v2 "
        "mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d "
        "shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 vgg11_bn wide_resnet50_2"
    ).split()
}
CASES |= {
    "resnet50": Case(named("resnet50"), [(2, 3, 65, 40)], (2, 3)),
    "convnext": Case(convnext, [(2, 3, 65, 40)], (2, 3)),
    "convnext_tiny": Case(named("convnext_tiny"), [(1, 3, 65, 40)], (2, 3)),
    "googlenet": Case(named("googlenet", init_weights=False), [(2, 3, 97, 70)], (2, 3)),
    "inception_v3": Case(
        named("inception_v3", init_weights=False, aux_logits=False), [(2, 3, 139, 107)], (2, 3)
    ),
    "swin": Case(swin, [(2, 3, 29, 40)], (2, 3)),
    "swin_v2": Case(lambda: swin(2), [(2, 3, 29, 40)], (2, 3)),
    "maxvit": Case(maxvit, [(2, 3, 56, 56)], (2, 3)),
    "vit": Case(vit, [(2, 3, 32, 32)], (2, 3)),
    "r3d_18": Case(named("r3d_18"), [(2, 3, 5, 33, 20)], (3, 2, 4)),
    "mc3_18": Case(named("mc3_18"), [(2, 3, 5, 33, 20)], (3, 2, 4)),
    "r2plus1d_18": Case(named("r2plus1d_18"), [(2, 3, 5, 33, 20)], (3, 2, 4)),
    "s3d": Case(named("s3d"), [(1, 3, 17, 225, 224)], (3,)),
    "mvit": Case(lambda: mvit(new=False), [(2, 3, 8, 32, 32)], (3, 2, 4)),
    "mvit_v2": Case(lambda: mvit(new=True), [(2, 3, 8, 32, 32)], (3, 2, 4)),
    "swin3d": Case(swin3d, [(2, 3, 5, 29, 22)], (3, 2, 4)),
} | {
    name: Case(segmentation(name), [(2, 3, 49, 38)], (2, 3))
    for name in (
        "deeplabv3_mobilenet_v3_large deeplabv3_resnet50 lraspp_mobilenet_v3_large fcn_resnet50"
    ).split()
}
