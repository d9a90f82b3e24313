"""Faster R-CNN of torchvision in training: proposals, matching, pooled boxes, four losses.

Its `transform` copies each image into a slice of a plain batch, which split rows cannot be copied
to; the case begins after it, as for images that are a batch already.
"""

import torch
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.image_list import ImageList

from benchmarks.model_zoo import Apply, Case


def detector():
    return fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=3,
        rpn_pre_nms_top_n_train=60,
        rpn_post_nms_top_n_train=30,
        box_batch_size_per_image=16,
    )


def losses(model, x):
    targets = [
        {
            "boxes": torch.tensor([[4.0, 6, 30, 40], [20, 10, 60, 50]]).double(),
            "labels": torch.tensor([1, 2]),
        },
        {"boxes": torch.tensor([[10.0, 12, 50, 44]]).double(), "labels": torch.tensor([2])},
    ]
    torch.manual_seed(7)  # of the sampled boxes
    images = ImageList(x, [tuple(x.shape[-2:])] * len(x))
    features = model.backbone(x)
    proposals, rpn = model.rpn(images, features, targets)
    _, heads = model.roi_heads(features, proposals, images.image_sizes, targets)
    return rpn | heads


CASES = {  # one of its losses is of float32, whatever its weights are
    "faster_rcnn": Case(
        lambda: Apply(losses, detector()), [(2, 3, 128, 96)], (2, 3), tolerance=1e-5
    ),
}
