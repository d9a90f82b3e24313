"""Volumes: networks and losses of MONAI, and torchio's loader."""
# pyright: reportMissingImports=false

from typing import Any

from benchmarks.program_zoo import SPLIT, Parts, classes, fields, numbers, program, supervised


def volumes(size: int = 32) -> list[Any]:
    return fields(
        4, lambda i: (numbers(1, *(size,) * 3, seed=i), classes(1, *(size,) * 3, of=2, seed=i))
    )


def segmented(net: Any) -> Parts:
    from monai.losses import DiceCELoss

    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    return Parts(supervised(net, loss), volumes())


@program("monai", meshes=SPLIT)
def monai_unet() -> Parts:
    from monai.networks.nets import UNet

    return segmented(UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1))


@program("monai")
def monai_segresnet() -> Parts:
    from monai.networks.nets import SegResNet

    return segmented(SegResNet(init_filters=8, in_channels=1, out_channels=2))


@program("monai")
def monai_dynunet() -> Parts:
    from monai.networks.nets import DynUNet

    return segmented(DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 16, 32]))


@program("monai")
def monai_attention_unet() -> Parts:
    from monai.networks.nets import AttentionUnet

    return segmented(AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2)))


@program("torchio", "torchio", "monai", float32=True)
def torchio_subjects() -> Parts:
    import torchio
    from lightning.pytorch import LightningModule
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    from torch.optim import AdamW

    class Segmenter(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)
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
