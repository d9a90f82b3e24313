"""Uncertainty: lightning-uq-box and torch-uncertainty."""
# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import nn

from benchmarks.program_zoo import Parts, classes, fields, numbers, program


def unet(outputs: int) -> nn.Module:
    import segmentation_models_pytorch

    return segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=outputs)


def pixels() -> list[Any]:
    return fields(
        4, lambda i: {"input": numbers(3, 64, 64, seed=i), "target": numbers(1, 64, 64, seed=i)}
    )


def pixelwise(name: str, outputs: int, **options: Any) -> Parts:
    import lightning_uq_box.uq_methods as methods

    return Parts(getattr(methods, name)(unet(outputs), **options), pixels())


@program("lightning-uq-box", "lightning_uq_box")
def uq_pixel_regression() -> Parts:
    return pixelwise("DeterministicPixelRegression", 1, loss_fn=nn.MSELoss())


@program("lightning-uq-box", "lightning_uq_box")
def uq_evidential_regression() -> Parts:
    return pixelwise("DERPxRegression", 4)


@program("lightning-uq-box", "lightning_uq_box")
def uq_quantile_regression() -> Parts:
    return pixelwise("QuantilePxRegression", 3)


@program("lightning-uq-box", "lightning_uq_box")
def uq_mean_variance() -> Parts:
    import lightning_uq_box.uq_methods as methods

    return Parts(methods.MVEPxRegression(unet(2)), pixels())


def segments() -> list[Any]:
    return fields(
        4, lambda i: {"input": numbers(3, 64, 64, seed=i), "target": classes(64, 64, of=3, seed=i)}
    )


@program("lightning-uq-box", "lightning_uq_box")
def uq_segmentation() -> Parts:
    import lightning_uq_box.uq_methods as methods

    return Parts(methods.DeterministicSegmentation(unet(3), nn.CrossEntropyLoss()), segments())


@program("lightning-uq-box", "lightning_uq_box")
def uq_dropout_segmentation() -> Parts:
    import lightning_uq_box.uq_methods as methods

    return Parts(methods.MCDropoutSegmentation(unet(3), 3, nn.CrossEntropyLoss()), segments())


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
    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), classes(64, 64, of=3, seed=i)))
    return Parts(routine, data)


@program("torch-uncertainty")
def torch_uncertainty_pixel_regression() -> Parts:
    from torch_uncertainty.routines import PixelRegressionRoutine

    net = unet(2)
    routine = PixelRegressionRoutine(
        net, 2, nn.MSELoss(), optim_recipe=torch.optim.Adam(net.parameters(), 1e-3)
    )
    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), numbers(2, 64, 64, seed=i)))
    return Parts(routine, data)
