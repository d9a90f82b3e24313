"""Earth observation and weather: torchgeo, terratorch, dgmr."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch

from benchmarks.program_zoo import (
    SPLIT,
    Parts,
    classes,
    fields,
    numbers,
    pictures,
    program,
    rows,
)

NAMES = ("image", "mask")


def labelled(label: Any, count: int = 4, size: int = 64) -> list[dict[str, Any]]:
    return fields(count, lambda i: {"image": numbers(3, size, size, seed=i), "label": label(i)})


def heights() -> list[dict[str, Any]]:
    return fields(
        4, lambda i: {"image": numbers(3, 64, 64, seed=i), "mask": numbers(64, 64, seed=i)}
    )


def evaluated(task: Any, data: Any, **options: Any) -> Parts:
    return Parts(task.double(), data, stages=("fit", "test"), **options)


def segmentation(model: str, loss: str = "ce") -> Parts:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(
        model, "resnet18", in_channels=3, num_classes=3, loss=loss, num_filters=4, lr=1e-3
    )
    return evaluated(task, pictures(*NAMES))


rows(
    "torchgeo",
    table={
        "torchgeo_unet": partial(segmentation, "unet"),
        "torchgeo_deeplab": partial(segmentation, "deeplabv3+"),
        "torchgeo_upernet_focal": partial(segmentation, "upernet", "focal"),
        "torchgeo_segformer_jaccard": partial(segmentation, "segformer", "jaccard"),
    },
)
program("torchgeo", name="torchgeo_fcn", meshes=SPLIT)(partial(segmentation, "fcn"))


@program("torchgeo")
def torchgeo_pixelwise_regression() -> Parts:
    from torchgeo.trainers import PixelwiseRegressionTask

    task = PixelwiseRegressionTask("unet", "resnet18", in_channels=3)
    return evaluated(task, heights())


@program("torchgeo")
def torchgeo_regression() -> Parts:
    from torchgeo.trainers import RegressionTask

    task = RegressionTask("resnet18", in_channels=3)
    return evaluated(task, labelled(lambda i: numbers(1, seed=i)))


@program("torchgeo", meshes=SPLIT)
def torchgeo_multilabel_convnext() -> Parts:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(
        "convnext_atto", in_channels=3, task="multilabel", num_labels=4, loss="bce"
    )
    return evaluated(task, labelled(lambda i: classes(4, seed=i)))


@program("torchgeo", meshes=SPLIT)
def torchgeo_vit_focal() -> Parts:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask("vit_tiny_patch16_224", in_channels=3, num_classes=5, loss="focal")
    data = labelled(lambda i: torch.tensor(i % 5), count=2, size=224)
    return evaluated(task, data)


@program("torchgeo", changed='shard_dims={"image": 3, "mask": 2}')
def torchgeo_change_detection() -> Parts:
    from torchgeo.trainers import ChangeDetectionTask

    task = ChangeDetectionTask("fcsiamdiff", "resnet18", in_channels=3, loss="bce")
    data = fields(
        4, lambda i: {"image": numbers(2, 3, 64, 64, seed=i), "mask": classes(1, 64, 64, seed=i)}
    )
    dims = {"shard_dims": {"image": 3, "mask": 2}}
    return evaluated(task, data, strategy=dims)


# with two samples the batch norms of the heads give nearly +1 and -1, whatever the images are, and
# rounding weighs more in the gradients (docs/gallery.md): so these learn from four
def unlabelled(task: Any, size: int = 64) -> Parts:
    data = fields(8, lambda i: {"image": numbers(3, size, size, seed=i).sigmoid()})
    return Parts(task.double(), data, batch=4)


@program("torchgeo")
def torchgeo_simclr() -> Parts:
    from torchgeo.trainers import SimCLRTask

    task = SimCLRTask(
        "resnet18", in_channels=3, lr=0.01, memory_bank_size=0, size=64, output_dim=32
    )
    return unlabelled(task)


# its student and its teacher are around one and the same backbone, which the average thus writes
@program("torchgeo", refused="p.data = value for a trained parameter")
def torchgeo_byol() -> Parts:
    from torchgeo.trainers import BYOLTask

    task = BYOLTask("resnet18", in_channels=3)
    return unlabelled(task, 256)


@program("torchgeo")
def torchgeo_moco() -> Parts:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask("resnet18", in_channels=3, hidden_dim=64, output_dim=32, size=64, lr=0.01)
    return unlabelled(task)


@program("torchgeo")
def torchgeo_detection() -> Parts:
    from torchgeo.trainers import ObjectDetectionTask

    task = ObjectDetectionTask("faster-rcnn", "resnet18", in_channels=3, num_classes=3)

    def sample(i: int) -> dict[str, Any]:
        return {
            "image": numbers(3, 64, 64, seed=i).sigmoid(),
            "bbox_xyxy": torch.tensor([[4.0, 6.0, 40.0, 50.0]], dtype=torch.get_default_dtype()),
            "label": torch.tensor([1]),
        }

    def loader(size: int) -> Any:
        from torch.utils.data import DataLoader
        from torchgeo.datamodules.utils import collate_fn_detection

        return DataLoader(fields(4, sample), size, collate_fn=collate_fn_detection)

    return Parts(task.double(), loader)


def terratorch(task: str, *, decoder: str, **options: Any) -> Any:
    import terratorch.tasks

    necks = [
        {"name": "SelectIndices", "indices": [0, 1, 2, 3]},
        {"name": "ReshapeTokensToImage"},
        {"name": "LearnedInterpolateToPyramidal"},
    ]
    args = {
        "backbone": "prithvi_eo_tiny", "backbone_pretrained": False, "backbone_img_size": 64,
        "backbone_bands": ["RED", "GREEN", "BLUE"], "necks": necks[: 2 if "Id" in decoder else 3],
        "decoder": decoder, **options.pop("args", {}),
    }  # fmt: skip
    kind = getattr(terratorch.tasks, task)
    return kind(args, "EncoderDecoderFactory", plot_on_val=False, **options)


@program("terratorch", meshes=SPLIT)
def terratorch_prithvi_segmentation() -> Parts:
    task = terratorch(
        "SemanticSegmentationTask", decoder="UperNetDecoder",
        args={"num_classes": 3, "decoder_channels": 16}, loss="dice",
    )  # fmt: skip
    return evaluated(task, pictures(*NAMES))


@program("terratorch")
def terratorch_prithvi_regression() -> Parts:
    task = terratorch(
        "PixelwiseRegressionTask", decoder="UNetDecoder",
        args={"decoder_channels": [32, 16, 8, 8]}, loss="rmse",
    )  # fmt: skip
    return evaluated(task, heights())


@program("terratorch")
def terratorch_prithvi_classification() -> Parts:
    task = terratorch(
        "ClassificationTask", decoder="IdentityDecoder", args={"num_classes": 3}, loss="ce"
    )
    return evaluated(task, labelled(lambda i: torch.tensor(i % 3)))


@program(
    "dgmr",
    float32=True,
    changed='shard_dims={"0": 3, "1": 3}',
    host="pytorch_lightning",
    large={"channels": 768},
)
def dgmr_nowcasting(channels: int = 384) -> Parts:
    from dgmr import DGMR

    module = DGMR(
        forecast_steps=2, output_shape=128, latent_channels=channels,
        context_channels=channels // 2, generation_steps=2,
    )  # fmt: skip
    data = fields(
        2, lambda i: (numbers(4, 1, 128, 128, seed=i), numbers(2, 1, 128, 128, seed=i + 9))
    )
    dims = {"shard_dims": {"0": 3, "1": 3}}
    return Parts(module, data, batch=1, validates=False, strategy=dims)


@program("rslearn")
def rslearn_segmentation() -> Parts:
    """Train a Swin transformer and a decoder on lists of dictionaries, as rslearn collates them."""
    from rslearn.models.singletask import SingleTaskModel
    from rslearn.models.swin import Swin
    from rslearn.models.unet import UNetDecoder
    from rslearn.train.lightning_module import RslearnLightningModule
    from rslearn.train.model_context import RasterImage
    from rslearn.train.tasks.segmentation import SegmentationHead, SegmentationTask
    from torch.utils.data import DataLoader

    encoder = Swin("swin_t", input_channels=4, output_layers=[1, 3])
    decoder = UNetDecoder([(4, 96), (8, 192)], 3, num_channels={1: 8, 2: 8, 4: 16, 8: 16})
    task = SegmentationTask(num_classes=3, enable_miou_metric=True, enable_f1_metric=True)
    model = SingleTaskModel([encoder], [decoder, SegmentationHead(dice_loss=True)])
    module = RslearnLightningModule(model, task)

    def item(i: int) -> Any:
        valid = (numbers(1, 1, 64, 64, seed=i + 90) > -1).to(torch.get_default_dtype())
        target = {
            "classes": RasterImage(classes(1, 1, 64, 64, of=3, seed=i)),
            "valid": RasterImage(valid),
        }
        return (
            {"image": RasterImage(numbers(4, 1, 64, 64, seed=i))},
            target,
            {"name": f"window {i}"},
        )

    def loader(size: int) -> Any:
        return DataLoader(
            fields(4, item), size, collate_fn=lambda items: tuple(zip(*items, strict=True))
        )  # pyright: ignore[reportArgumentType]

    return Parts(module, loader, stages=("fit", "test"))
