"""segmentation_models_pytorch: every architecture on a small encoder, and its losses."""

import segmentation_models_pytorch as smp
import torch
from segmentation_models_pytorch import losses

from benchmarks.model_zoo import row


def net(kind, encoder="resnet18", *, on=(2, 3, 64, 96), within=1e-10, **options):
    return row(kind, encoder, encoder_weights=None, classes=2, **options, on=on, within=within)


def maps(classes, *shape):
    """Predictions of three classes, and targets of as many."""
    return [(2, 3, 9, 7), lambda: torch.randint(classes, shape)]


LABELLED = maps(3, 2, 9, 7)
BINARY = [(2, 3, 9, 7), lambda: torch.randint(2, (2, 3, 9, 7)).double()]
CASES = {
    "unet": net(smp.Unet),
    "unet_scse": net(smp.Unet, decoder_attention_type="scse"),
    "unet_efficientnet": net(smp.Unet, "efficientnet-b0"),
    "unet_mit": net(smp.Unet, "mit_b0"),
    "unet_mobileone": net(smp.Unet, "mobileone_s0"),
    "unet_timm": net(smp.Unet, "tu-test_convnext"),
    "unet_senet": net(smp.Unet, "se_resnet50"),
    "unet_vgg": net(smp.Unet, "vgg11_bn"),
    "unet_dpn": net(smp.Unet, "dpn68"),
    "unet_xception": net(smp.Unet, "xception"),
    "unet_inception": net(smp.Unet, "inceptionv4"),
    "unet_class": net(smp.Unet, aux_params={"classes": 3}),
    "unet_plus_plus": net(smp.UnetPlusPlus),
    "manet": net(smp.MAnet),
    "linknet": net(smp.Linknet),
    "fpn": net(smp.FPN),
    "pspnet": net(smp.PSPNet, on=(2, 3, 72, 96)),
    "pan": net(smp.PAN, on=(2, 3, 128, 128)),
    "deeplabv3": net(smp.DeepLabV3),
    "deeplabv3_plus": net(smp.DeepLabV3Plus),
    "upernet": net(smp.UPerNet),
    "segformer": net(smp.Segformer, "mit_b0"),
    "dpt": net(smp.DPT, "tu-vit_tiny_patch16_224", dynamic_img_size=True, on=(1, 3, 64, 96),
        within=1e-5),
    "dice_loss": row(losses.DiceLoss, "multiclass", on=LABELLED),
    "dice_binary": row(losses.DiceLoss, "binary", on=BINARY),
    "dice_multilabel": row(losses.DiceLoss, "multilabel", log_loss=True, ignore_index=2,
        on=maps(3, 2, 3, 9, 7)),
    "jaccard_loss": row(losses.JaccardLoss, "multiclass", on=LABELLED),
    "tversky_loss": row(losses.TverskyLoss, "multiclass", on=LABELLED),
    "focal_loss": row(losses.FocalLoss, "multiclass", on=LABELLED),
    "focal_ignore": row(losses.FocalLoss, "multiclass", ignore_index=1, on=LABELLED),
    "focal_binary": row(losses.FocalLoss, "binary", alpha=0.3, normalized=True, on=BINARY),
    "soft_bce": row(losses.SoftBCEWithLogitsLoss, smooth_factor=0.1, on=BINARY),
    "soft_ce": row(losses.SoftCrossEntropyLoss, smooth_factor=0.1, on=LABELLED),
    "mcc": row(losses.MCCLoss, on=BINARY, run=lambda f, x, y: f(x.sigmoid(), y)),
}  # fmt: skip
