"""Networks of torchvision: images and videos."""

import pytest
import torch

import lightning_shard
from benchmarks.model_zoo.torchvision_detection import masks
from tests.models.check import check
from tests.parity import mesh_of


@pytest.mark.quick_rows("convnext", "vit", "swin3d")
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_an_untrained_detector_finds_what_one_process_finds():
    """Break ties of scores in the padding, alike in both runs.

    Rounding decides there: in one process 1e-15 more or less gives other boxes.
    """
    torch.manual_seed(1)
    module = masks().double().eval()
    images, mesh = torch.rand(2, 3, 72, 64, dtype=torch.float64), mesh_of(2)

    def break_ties(_module, _inputs, scores):
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(7)) * 1e-6
        is_split = isinstance(scores, lightning_shard.DomainTensor)
        return scores + (lightning_shard.shard(noise, mesh, 2) if is_split else noise)

    module.rpn.head.cls_logits.register_forward_hook(break_ties)
    with torch.no_grad():
        expected = module(list(images))
        found = module(list(lightning_shard.shard(images, mesh, 2)))
    for one, other in zip(found, expected, strict=True):
        assert len(other["boxes"]) > 5
        for key, value in other.items():
            torch.testing.assert_close(
                lightning_shard.gather(one[key]), value, rtol=1e-10, atol=1e-10
            )
