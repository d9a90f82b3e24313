"""Networks of torchvision: images and videos."""

import pytest

from tests.models.check import check


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        pytest.param("resnet50", marks=pytest.mark.slow),
        "convnext",
        "mobilenet_v3_small",
        pytest.param("lraspp_mobilenet_v3_large", marks=pytest.mark.slow),
        pytest.param("fcn_resnet50", marks=pytest.mark.slow),
        "vit",
        "swin",
        "swin_v2",
        "swin3d",
        "mvit_v2",
    ],
)
def test_model(name):
    check("torchvision", name, 2)


@pytest.mark.spmd(2)
def test_detection_with_masks():
    check("torchvision", "mask_rcnn", 2)


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_detection():
    check("torchvision", "faster_rcnn", 3)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_two_by_two_ranks():
    check("torchvision", "mobilenet_v3_small", 2, 2)
