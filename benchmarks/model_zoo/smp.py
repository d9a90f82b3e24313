"""segmentation_models_pytorch: every architecture on a small encoder, and its losses."""

import segmentation_models_pytorch as smp
import torch

from benchmarks.model_zoo import Apply, Case


def net(kind, encoder="resnet18", **options):
    return lambda: kind(encoder, encoder_weights=None, classes=2, **options)


def labels(*shape):
    return lambda: torch.randint(3, shape)


def loss(make, target=None):
    return Case(
        lambda: Apply(lambda f, x, y: f(x, y), make()),
        [(2, 3, 9, 7), target or labels(2, 9, 7)],
        (2, 3),
    )


IMAGE = (2, 3, 64, 96)
CASES = {
    "unet": Case(net(smp.Unet), [IMAGE], (2, 3)),
    "unet_scse": Case(net(smp.Unet, decoder_attention_type="scse"), [IMAGE], (2, 3)),
    "unet_efficientnet": Case(net(smp.Unet, "efficientnet-b0"), [IMAGE], (2, 3)),
    "unet_mit": Case(net(smp.Unet, "mit_b0"), [IMAGE], (2, 3)),
    "unet_mobileone": Case(net(smp.Unet, "mobileone_s0"), [IMAGE], (2, 3)),
    "unet_timm": Case(net(smp.Unet, "tu-test_convnext"), [IMAGE], (2, 3)),
    "unet_senet": Case(net(smp.Unet, "se_resnet50"), [IMAGE], (2, 3)),
    "unet_vgg": Case(net(smp.Unet, "vgg11_bn"), [IMAGE], (2, 3)),
    "unet_dpn": Case(net(smp.Unet, "dpn68"), [IMAGE], (2, 3)),
    "unet_xception": Case(net(smp.Unet, "xception"), [IMAGE], (2, 3)),
    "unet_inception": Case(net(smp.Unet, "inceptionv4"), [IMAGE], (2, 3)),
    "unet_class": Case(net(smp.Unet, aux_params={"classes": 3}), [IMAGE], (2, 3)),
    "unet_plus_plus": Case(net(smp.UnetPlusPlus), [IMAGE], (2, 3)),
    "manet": Case(net(smp.MAnet), [IMAGE], (2, 3)),
    "linknet": Case(net(smp.Linknet), [IMAGE], (2, 3)),
    "fpn": Case(net(smp.FPN), [IMAGE], (2, 3)),
    "pspnet": Case(net(smp.PSPNet), [(2, 3, 72, 96)], (2, 3)),
    "pan": Case(net(smp.PAN), [(2, 3, 128, 128)], (2, 3)),
    "deeplabv3": Case(net(smp.DeepLabV3), [IMAGE], (2, 3)),
    "deeplabv3_plus": Case(net(smp.DeepLabV3Plus), [IMAGE], (2, 3)),
    "upernet": Case(net(smp.UPerNet), [IMAGE], (2, 3)),
    "segformer": Case(net(smp.Segformer, "mit_b0"), [IMAGE], (2, 3)),
    "dpt": Case(net(smp.DPT, "tu-vit_tiny_patch16_224", dynamic_img_size=True), [(1, 3, 64, 96)],
        (2, 3)),
    "dice_loss": loss(lambda: smp.losses.DiceLoss("multiclass")),
    "dice_binary": loss(lambda: smp.losses.DiceLoss("binary"),
        lambda: torch.randint(2, (2, 3, 9, 7)).double()),
    "dice_multilabel": loss(
        lambda: smp.losses.DiceLoss("multilabel", log_loss=True, ignore_index=2),
        lambda: torch.randint(3, (2, 3, 9, 7)),
    ),
    "jaccard_loss": loss(lambda: smp.losses.JaccardLoss("multiclass")),
    "tversky_loss": loss(lambda: smp.losses.TverskyLoss("multiclass")),
    "focal_loss": loss(lambda: smp.losses.FocalLoss("multiclass")),
    "focal_ignore": loss(lambda: smp.losses.FocalLoss("multiclass", ignore_index=1)),
    "focal_binary": loss(lambda: smp.losses.FocalLoss("binary", alpha=0.3, normalized=True),
        lambda: torch.randint(2, (2, 3, 9, 7)).double()),
    "soft_bce": loss(lambda: smp.losses.SoftBCEWithLogitsLoss(smooth_factor=0.1),
        lambda: torch.randint(2, (2, 3, 9, 7)).double()),
    "soft_ce": loss(lambda: smp.losses.SoftCrossEntropyLoss(smooth_factor=0.1)),
    "mcc": Case(lambda: Apply(lambda f, x, y: f(x.sigmoid(), y), smp.losses.MCCLoss()),
        [(2, 3, 9, 7), lambda: torch.randint(2, (2, 3, 9, 7)).double()], (2, 3)),
}  # fmt: skip

CASES["dpt"] = Case(
    net(smp.DPT, "tu-vit_tiny_patch16_224", dynamic_img_size=True), [(1, 3, 64, 96)], (2, 3), 1e-5
)
