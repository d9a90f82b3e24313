"""Volumes: networks, losses and windows of MONAI, torchio's loader, viscy's stains."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

from benchmarks.program_zoo import (
    SPLIT,
    Parts,
    classes,
    fields,
    folder,
    numbers,
    program,
    rows,
    supervised,
)

VOLUME = (1, 32, 32, 32)


def volumes() -> list[Any]:
    return fields(
        4, lambda i: {"image": numbers(*VOLUME, seed=i), "label": classes(*VOLUME, seed=i)}
    )


def segmented(name: str, *arguments: Any, **options: Any) -> Parts:
    from monai.losses import DiceCELoss
    from monai.networks import nets

    net = getattr(nets, name)(*arguments, **options)
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return Parts(supervised(net, loss), [tuple(sample.values()) for sample in volumes()])


rows(
    "monai",
    table={
        "monai_segresnet": partial(
            segmented, "SegResNet", init_filters=8, in_channels=1, out_channels=2
        ),
        "monai_dynunet": partial(
            segmented, "DynUNet", 3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 16, 32]
        ),
        "monai_attention_unet": partial(segmented, "AttentionUnet", 3, 1, 2, (8, 16, 32), (2, 2)),
    },
)
program("monai", name="monai_unet", meshes=SPLIT)(
    partial(segmented, "UNet", 3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)
)


@program("torchio", "torchio", "monai", meshes=SPLIT, float32=True)
def torchio_subjects() -> Parts:
    import torchio
    from lightning.pytorch import LightningModule
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from torch.optim import AdamW

    class Segmenter(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # without biases, which the norms cancel, so that Adam would follow rounding
            self.net = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1, bias=False)
            self.loss = DiceCELoss(to_onehot_y=True, softmax=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(self.net(batch["image"]["data"]), batch["label"]["data"])
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), 1e-3)

    def subject(i: int) -> Any:
        image = torchio.ScalarImage(tensor=numbers(1, 32, 32, 32, seed=i))
        label = torchio.LabelMap(tensor=classes(1, 32, 32, 32, seed=i))
        return torchio.Subject(image=image, label=label)

    def loader(size: int) -> Any:
        return torchio.SubjectsLoader(torchio.SubjectsDataset(fields(4, subject)), batch_size=size)

    return Parts(Segmenter(), loader, validates=False)


# its transforms make MetaTensors of parts of batches
@program("monai", float32=True, meshes=SPLIT, refused="cannot be of the class monai")
def monai_spleen_sliding_window() -> Parts:
    """MONAI's tutorial of the spleen in 3D: MetaTensors, windows and Dice in validation."""
    import torch
    from lightning.pytorch import LightningModule
    from monai.data import CacheDataset, DataLoader, decollate_batch
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceLoss
    from monai.metrics import DiceMetric
    from monai.networks.layers import Norm
    from monai.networks.nets import UNet
    from monai.transforms import AsDiscrete, Compose, EnsureType, EnsureTyped, ScaleIntensityd

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self._model = UNet(
                3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2, norm=Norm.BATCH
            )  # fmt: skip
            self.loss_function = DiceLoss(to_onehot_y=True, softmax=True)
            self.post_pred = Compose(
                [EnsureType("tensor", device="cpu"), AsDiscrete(argmax=True, to_onehot=2)]
            )
            self.post_label = Compose([EnsureType("tensor", device="cpu"), AsDiscrete(to_onehot=2)])
            self.dice_metric = DiceMetric(include_background=False, reduction="mean")
            self.outputs: list[Any] = []

        def forward(self, x: Any) -> Any:
            return self._model(x)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self._model.parameters(), 1e-3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss_function(self(batch["image"]), batch["label"])
            self.log("train_loss", loss.item(), sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch["image"], batch["label"]
            outputs = sliding_window_inference(images, (16, 16, 16), 4, self.forward)
            loss = self.loss_function(outputs, labels)
            outputs = [self.post_pred(i) for i in decollate_batch(outputs)]
            labels = [self.post_label(i) for i in decollate_batch(labels)]
            self.dice_metric(y_pred=outputs, y=labels)
            self.outputs.append((loss, len(outputs)))

        def on_validation_epoch_end(self) -> None:
            losses = torch.stack([loss * count for loss, count in self.outputs])
            items = sum(count for _, count in self.outputs)
            self.log("val_dice", self.dice_metric.aggregate().item(), sync_dist=True)
            self.log("val_loss", losses.sum() / items, sync_dist=True)
            self.dice_metric.reset()
            self.outputs.clear()

    files = volumes()
    transforms = Compose([EnsureTyped(["image", "label"]), ScaleIntensityd("image")])

    def loader(size: int) -> Any:
        return DataLoader(CacheDataset(files, transforms, progress=False), batch_size=size)

    return Parts(Net(), loader)


def stained(architecture: str, loss: Any = None, **options: Any) -> Parts:
    from lightning.pytorch.loggers import TensorBoardLogger
    from viscy.translation.engine import VSUNet

    config = {"in_channels": 1, "out_channels": 1, "in_stack_depth": 5, **options}
    module = VSUNet(architecture, config, loss, log_samples_per_batch=1)
    data = fields(
        4,
        lambda i: {
            "source": numbers(1, 5, 64, 64, seed=i),
            "target": numbers(1, 5, 64, 64, seed=i),
        },
    )
    logger = TensorBoardLogger(folder("viscy"), architecture, version=0)
    return Parts(module, data, trainer={"logger": logger}, strategy={"shard_dims": PLANES})


PLANES = {"source": 3, "target": 3}
SPLIT_PLANES = 'shard_dims={"source": 3, "target": 3}'


# as an epoch ends it draws pictures of parts of batches in numpy
PICTURES = "the values lie on several ranks"


@program("viscy", changed=SPLIT_PLANES, refused=PICTURES)
def viscy_unext2() -> Parts:
    return stained("UNeXt2", backbone="convnextv2_atto", decoder_conv_blocks=1)


@program("viscy", changed=SPLIT_PLANES, float32=True, refused=PICTURES)
def viscy_fcmae() -> Parts:
    from viscy.translation.engine import MixedLoss

    return stained(
        "fcmae", MixedLoss(l1_alpha=0.5, ms_dssim_alpha=0.0), pretraining=False,
        encoder_blocks=[1, 1, 1, 1], dims=[8, 16, 32, 64],
    )  # fmt: skip
