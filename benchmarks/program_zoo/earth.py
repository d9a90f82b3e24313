"""Earth observation and weather: torchgeo, terratorch, dgmr."""
# pyright: reportMissingImports=false

from typing import Any

import torch

from benchmarks.program_zoo import SPLIT, Parts, classes, fields, numbers, program

# torchgeo logs it on each replica by itself, and its scheduler follows it
APART = "the ranks disagree on 'val_loss'"


def scenes(count: int = 4, size: int = 64, of: int = 2) -> list[dict[str, Any]]:
    return fields(
        count,
        lambda i: {
            "image": numbers(3, size, size, seed=i),
            "mask": classes(size, size, of=of, seed=i),
        },
    )


def labelled(label: Any, count: int = 4, size: int = 64) -> list[dict[str, Any]]:
    return fields(count, lambda i: {"image": numbers(3, size, size, seed=i), "label": label(i)})


def segmentation(model: str, backbone: str, loss: str = "ce", size: int = 64) -> Parts:
    from torchgeo.trainers import SemanticSegmentationTask

    task = SemanticSegmentationTask(
        model, backbone, in_channels=3, num_classes=3, loss=loss, num_filters=4, lr=1e-3
    )
    return Parts(task.double(), scenes(size=size, of=3), stages=("fit", "test"))


@program("torchgeo")
def torchgeo_unet() -> Parts:
    return segmentation("unet", "resnet18")


@program("torchgeo")
def torchgeo_deeplab() -> Parts:
    return segmentation("deeplabv3+", "resnet18")


@program("torchgeo")
def torchgeo_upernet_focal() -> Parts:
    return segmentation("upernet", "resnet18", "focal")


@program("torchgeo")
def torchgeo_segformer_jaccard() -> Parts:
    return segmentation("segformer", "resnet18", "jaccard")


@program("torchgeo", meshes=SPLIT, refused=APART)
def torchgeo_fcn() -> Parts:
    return segmentation("fcn", "resnet18")


@program("torchgeo")
def torchgeo_pixelwise_regression() -> Parts:
    from torchgeo.trainers import PixelwiseRegressionTask

    task = PixelwiseRegressionTask("unet", "resnet18", in_channels=3)
    data = fields(
        4, lambda i: {"image": numbers(3, 64, 64, seed=i), "mask": numbers(64, 64, seed=i)}
    )
    return Parts(task.double(), data, stages=("fit", "test"))


@program("torchgeo")
def torchgeo_regression() -> Parts:
    from torchgeo.trainers import RegressionTask

    task = RegressionTask("resnet18", in_channels=3)
    return Parts(task.double(), labelled(lambda i: numbers(1, seed=i)), stages=("fit", "test"))


@program("torchgeo", meshes=SPLIT, refused=APART)
def torchgeo_multilabel_convnext() -> Parts:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask(
        "convnext_atto", in_channels=3, task="multilabel", num_labels=4, loss="bce"
    )
    return Parts(task.double(), labelled(lambda i: classes(4, seed=i)), stages=("fit", "test"))


@program("torchgeo", meshes=SPLIT, refused=APART)
def torchgeo_vit_focal() -> Parts:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask("vit_tiny_patch16_224", in_channels=3, num_classes=5, loss="focal")
    data = labelled(lambda i: torch.tensor(i % 5), count=2, size=224)
    return Parts(task.double(), data, stages=("fit", "test"))


@program("torchgeo", changed='shard_dims={"image": 3, "mask": 2}')
def torchgeo_change_detection() -> Parts:
    from torchgeo.trainers import ChangeDetectionTask

    task = ChangeDetectionTask("fcsiamdiff", "resnet18", in_channels=3, loss="bce")
    data = fields(
        4, lambda i: {"image": numbers(2, 3, 64, 64, seed=i), "mask": classes(1, 64, 64, seed=i)}
    )
    dims = {"shard_dims": {"image": 3, "mask": 2}}
    return Parts(task.double(), data, strategy=dims, stages=("fit", "test"))


@program("torchgeo", float32=True)
def torchgeo_simclr() -> Parts:
    from torchgeo.trainers import SimCLRTask

    task = SimCLRTask(
        "resnet18", in_channels=3, lr=0.01, memory_bank_size=0, size=64, output_dim=32
    )
    return Parts(task, fields(4, lambda i: {"image": numbers(3, 64, 64, seed=i).sigmoid()}))


@program("torchgeo", float32=True)
def torchgeo_byol() -> Parts:
    from torchgeo.trainers import BYOLTask

    task = BYOLTask("resnet18", in_channels=3)
    return Parts(task, fields(4, lambda i: {"image": numbers(3, 256, 256, seed=i).sigmoid()}))


@program("torchgeo", float32=True)
def torchgeo_moco() -> Parts:
    from torchgeo.trainers import MoCoTask

    task = MoCoTask("resnet18", in_channels=3, hidden_dim=64, output_dim=32, size=64, lr=0.01)
    return Parts(task, fields(4, lambda i: {"image": numbers(3, 64, 64, seed=i).sigmoid()}))


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
