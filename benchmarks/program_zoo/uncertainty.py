"""Uncertainty: lightning-uq-box and torch-uncertainty."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.program_zoo import Parts, fields, numbers, pictures, program, rows


def unet(outputs: int) -> nn.Module:
    import segmentation_models_pytorch

    return segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=outputs)


def of_uq(name: str, outputs: int, *loss: Any, **options: Any) -> Parts:
    import lightning_uq_box.uq_methods as methods

    if "Px" in name or "Pixel" in name:
        data: Any = fields(
            4, lambda i: {"input": numbers(3, 64, 64, seed=i), "target": numbers(1, 64, 64, seed=i)}
        )
    else:
        data = pictures("input", "target")
    return Parts(getattr(methods, name)(unet(outputs), *loss, **options), data)


CROSS_ENTROPY = nn.CrossEntropyLoss()
rows(
    "lightning-uq-box",
    "lightning_uq_box",
    table={
        "uq_pixel_regression": partial(
            of_uq, "DeterministicPixelRegression", 1, loss_fn=nn.MSELoss()
        ),
        "uq_evidential_regression": partial(of_uq, "DERPxRegression", 4),
        "uq_quantile_regression": partial(of_uq, "QuantilePxRegression", 3),
        "uq_mean_variance": partial(of_uq, "MVEPxRegression", 2),
        "uq_segmentation": partial(of_uq, "DeterministicSegmentation", 3, CROSS_ENTROPY),
        "uq_dropout_segmentation": partial(of_uq, "MCDropoutSegmentation", 3, 3, CROSS_ENTROPY),
    },
)


# its metrics of calibration add in float32
@program("torch-uncertainty", float32=True)
def torch_uncertainty_classification() -> Parts:
    import torchvision
    from torch_uncertainty.routines import ClassificationRoutine

    net = torchvision.models.resnet18(num_classes=3)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    routine = ClassificationRoutine(net, 3, nn.CrossEntropyLoss(), optim_recipe=optimizer)
    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), torch.tensor(i % 3)))
    return Parts(routine, data)


SGD = "SGD, since its metrics want float32, in which Adam grows the rounding of vanishing gradients"


@program("torch-uncertainty", float32=True, changed=SGD)
def torch_uncertainty_segmentation() -> Parts:
    from torch_uncertainty.routines import SegmentationRoutine

    net = unet(3)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    routine = SegmentationRoutine(net, 3, nn.CrossEntropyLoss(), optim_recipe=optimizer)
    return Parts(routine, pictures())


@program("torch-uncertainty")
def torch_uncertainty_pixel_regression() -> Parts:
    from torch_uncertainty.routines import PixelRegressionRoutine

    net = unet(2)
    routine = PixelRegressionRoutine(
        net, 2, nn.MSELoss(), optim_recipe=torch.optim.Adam(net.parameters(), 1e-3)
    )
    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), numbers(2, 64, 64, seed=i)))
    return Parts(routine, data)
