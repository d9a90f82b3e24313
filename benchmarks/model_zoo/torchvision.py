"""torchvision: classification, segmentation, video and optical flow."""

import torchvision.models as tv
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.video import SwinTransformer3d
from torchvision.models.video.mvit import MSBlockConfig, MViT

from benchmarks.model_zoo import row

CONVOLUTIONS = (
    "alexnet densenet121 efficientnet_b0 efficientnet_v2_s mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d "
    "shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 vgg11_bn wide_resnet50_2"
).split()
SEGMENTATION = (
    "deeplabv3_mobilenet_v3_large deeplabv3_resnet50 lraspp_mobilenet_v3_large fcn_resnet50"
).split()
VIDEO, OVER_TIME = (2, 3, 5, 33, 20), (3, 2, 4)
SWIN_V2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}


def named(name, *, on=(2, 3, 97, 70), split=(), **options):
    options = {"weights": None, "num_classes": 5} | options
    return row(tv.get_model, name, **options, on=on, split=split)


def swin(**options):
    return row(
        tv.SwinTransformer, [2, 2], 8, [2, 2], [2, 2], [3, 3], num_classes=5,
        stochastic_depth_prob=0.0, **options, on=(2, 3, 29, 40),
    )  # fmt: skip


def convnext():
    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 2)]
    return ConvNeXt(settings, num_classes=5)


def mvit(new):
    blocks = [
        MSBlockConfig(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    return MViT(
        (32, 32), 8, blocks, residual_pool=new, residual_with_cls_embed=not new, rel_pos_embed=new,
        proj_after_attn=new, num_classes=5,
    )  # fmt: skip


CASES = {name: named(name) for name in CONVOLUTIONS} | {
    "resnet50": named("resnet50", on=(2, 3, 65, 40)),
    "convnext": row(convnext, on=(2, 3, 65, 40)),
    "convnext_tiny": named("convnext_tiny", on=(1, 3, 65, 40)),
    "googlenet": named("googlenet", init_weights=False),
    "inception_v3": named("inception_v3", init_weights=False, aux_logits=False,
        on=(2, 3, 139, 107)),
    "swin": swin(),
    "swin_v2": swin(**SWIN_V2),
    "maxvit": row(tv.MaxVit, (56, 56), 8, 7, [8, 16], [1, 2], 8, 0.0, num_classes=5,
        on=(2, 3, 56, 56)),
    "vit": row(tv.VisionTransformer, 32, 8, 2, 2, 16, 32, num_classes=5, on=(2, 3, 32, 32)),
    "r3d_18": named("r3d_18", on=VIDEO, split=OVER_TIME),
    "mc3_18": named("mc3_18", on=VIDEO, split=OVER_TIME),
    "r2plus1d_18": named("r2plus1d_18", on=VIDEO, split=OVER_TIME),
    "s3d": named("s3d", on=(1, 3, 17, 225, 224), split=(3,)),
    "mvit": row(mvit, new=False, on=(2, 3, 8, 32, 32), split=OVER_TIME),
    "mvit_v2": row(mvit, new=True, on=(2, 3, 8, 32, 32), split=OVER_TIME),
    "swin3d": row(SwinTransformer3d, [2, 4, 4], 8, [2, 2], [2, 2], [2, 3, 3], num_classes=5,
        on=(2, 3, 5, 29, 22), split=OVER_TIME),
}  # fmt: skip
CASES |= {
    name: named(name, weights_backbone=None, num_classes=3, on=(2, 3, 49, 38))
    for name in SEGMENTATION
}
