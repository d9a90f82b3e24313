"""Fields of weather services: networks of Météo-France's mfai, with its own LightningModule."""
# pyright: reportMissingImports=false

import importlib
from functools import partial
from typing import Any

import torch

from benchmarks.program_zoo import Parts, classes, fields, folder, numbers, rows


def forecast(
    name: str, size: tuple[int, int] = (48, 64), kind: str = "regression", **options: Any
) -> Parts:
    from lightning.pytorch.loggers import TensorBoardLogger
    from mfai.pytorch.lightning_modules import SegmentationLightningModule

    file, _, name = name.partition(".")
    network = getattr(importlib.import_module(f"mfai.pytorch.models.{file}"), name)
    channels = options.pop("channels", 2)
    settings = network.settings_kls(**options)
    model = network(in_channels=channels, out_channels=3, input_shape=size, settings=settings)
    loss = torch.nn.MSELoss() if kind == "regression" else torch.nn.CrossEntropyLoss()

    def sample(i: int) -> Any:
        x = numbers(channels, *size, seed=i)
        y = numbers(3, *size, seed=i + 50) if kind == "regression" else classes(*size, of=3, seed=i)
        return x, y

    module = SegmentationLightningModule(model.to(torch.get_default_dtype()), kind, loss)
    logger = TensorBoardLogger(folder(name))
    return Parts(module, fields(4, sample), trainer={"logger": logger}, stages=("fit", "test"))


SQUARE = {"size": (64, 64)}
RESNET = SQUARE | {"encoder_name": "resnet18", "encoder_weights": False}
rows(
    "mfai",
    table={
        "mfai_half_unet": partial(forecast, "half_unet.HalfUNet"),
        "mfai_half_unet_absolute": partial(forecast, "half_unet.HalfUNet", absolute_pos_embed=True),
        "mfai_unet_classes": partial(forecast, "unet.UNet", kind="multiclass"),
        "mfai_custom_unet": partial(forecast, "unet.CustomUNet", **RESNET),
        "mfai_deeplab": partial(forecast, "deeplabv3.DeepLabV3Plus", **RESNET),
        "mfai_segformer": partial(forecast, "segformer.Segformer", **SQUARE),
        "mfai_swin_unetr": partial(forecast, "swinunetr.SwinUNetR", **SQUARE),
        "mfai_unetrpp": partial(forecast, "unetrpp.UNetRPP", **SQUARE),
    },
)
