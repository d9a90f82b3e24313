"""Faster R-CNN, Mask R-CNN and RetinaNet of torchvision in training, whole: images, losses.

Images of two sizes are resized and copied into one batch, proposals are matched, boxes and masks
pooled.
"""

import torch
from torch import nn
from torchvision.models.detection import (
    MaskRCNN,
    fasterrcnn_mobilenet_v3_large_320_fpn,
    retinanet_resnet50_fpn,
)
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from benchmarks.model_zoo import row

SAMPLED = {
    "rpn_pre_nms_top_n_train": 60,
    "rpn_post_nms_top_n_train": 30,
    "box_batch_size_per_image": 16,
}


def detector():
    return fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=80, max_size=112, **SAMPLED,
    )  # fmt: skip


class Backbone(nn.Sequential):
    """Two convolutions, with the number of channels that the detector asks for."""

    out_channels = 8

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())


def masks():
    return MaskRCNN(
        Backbone(), num_classes=3,
        rpn_anchor_generator=AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2), mask_roi_pool=MultiScaleRoIAlign(["0"], 5, 2),
        min_size=48, max_size=64, **SAMPLED,
    )  # fmt: skip


def retina():
    return retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96
    )


def losses(model, x):
    images = [x[0], x[1, :, :-20]]
    targets = [
        {"boxes": torch.tensor([[4.0, 6, 30, 40], [20, 10, 60, 50]]).double(),
        "labels": torch.tensor([1, 2])}, {"boxes": torch.tensor([[10.0, 12, 50, 44]]).double(),
        "labels": torch.tensor([2])},
    ]  # fmt: skip
    for image, target in zip(images, targets, strict=True):
        target["masks"] = torch.zeros(len(target["boxes"]), *image.shape[-2:], dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(target["masks"], target["boxes"].long(), strict=True):
            mask[y1:y2, x1:x2] = 1
    torch.manual_seed(7)  # of the sampled boxes
    return model(images, targets)


CASES = {
    "retinanet": row(retina, on=(2, 3, 96, 64), run=losses),
    # one of the losses of these is of float32, whatever their weights are
    "faster_rcnn": row(detector, on=(2, 3, 128, 96), within=1e-5, run=losses),
    "mask_rcnn": row(masks, on=(2, 3, 72, 64), within=1e-5, run=losses),
}
