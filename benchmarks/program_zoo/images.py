"""Images: segmentation-models-pytorch, timm, torchvision, kornia, diffusers."""
# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.program_zoo import (
    SPLIT,
    Parts,
    fields,
    numbers,
    pictures,
    program,
    rows,
    supervised,
)


def smp(name: str) -> Parts:
    import segmentation_models_pytorch

    kind = getattr(segmentation_models_pytorch, name)
    net = kind("resnet18", encoder_weights=None, in_channels=3, classes=3)
    loss = segmentation_models_pytorch.losses.DiceLoss("multiclass")
    return Parts(supervised(net, lambda x, y: loss(x, y) + F.cross_entropy(x, y)), pictures())


rows(
    "segmentation-models-pytorch",
    table={
        f"smp_{name.lower()}": partial(smp, name) for name in ("Unet", "FPN", "MAnet", "Linknet")
    },
)


def classifier(net: Any) -> Parts:
    data = fields(4, lambda i: (numbers(3, 64, 64, seed=i), torch.tensor(i % 3)))
    return Parts(supervised(net, F.cross_entropy), data)


def timm(name: str, **options: Any) -> Parts:
    import timm

    return classifier(timm.create_model(name, num_classes=3, **options))


program("timm", name="timm_convnext", meshes=SPLIT)(partial(timm, "convnext_atto"))
rows(
    "timm",
    table={
        "timm_vit": partial(timm, "vit_tiny_patch16_224", img_size=64),
        "timm_efficientnet": partial(timm, "efficientnet_b0"),
    },
)


@program("torchvision")
def torchvision_resnet() -> Parts:
    import torchvision

    return classifier(torchvision.models.resnet18(num_classes=3))


@program("torchvision")
def torchvision_deeplab() -> Parts:
    import torchvision

    make = torchvision.models.segmentation.lraspp_mobilenet_v3_large
    net = make(weights=None, weights_backbone=None, num_classes=3)
    return Parts(supervised(net, lambda x, y: F.cross_entropy(x["out"], y)), pictures())


@program("kornia")
def kornia_augmentations_in_the_hook() -> Parts:
    import kornia.augmentation as K
    import segmentation_models_pytorch

    net = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=3)
    module = supervised(net, F.cross_entropy)
    flips = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), K.RandomVerticalFlip(p=0.5), data_keys=["input", "mask"]
    )

    def augment(batch: Any, dataloader_idx: int) -> Any:
        x, y = flips(batch[0], batch[1][:, None].to(batch[0].dtype))
        return x, y[:, 0].long()

    module.on_after_batch_transfer = augment
    return Parts(module, pictures())


@program("diffusers")
def diffusers_ddpm() -> Parts:
    import diffusers
    from lightning.pytorch import LightningModule

    class Diffusion(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = diffusers.UNet2DModel(
                sample_size=32, in_channels=1, out_channels=1, layers_per_block=1,
                block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            )  # fmt: skip
            self.noise = diffusers.DDPMScheduler(100)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            noise = torch.randn_like(batch)
            steps = torch.tensor([3, 70])[: batch.shape[0]]
            noisy = self.noise.add_noise(batch, noise, steps)
            loss = F.mse_loss(self.net(noisy, steps).sample, noise)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    return Parts(Diffusion(), fields(4, lambda i: numbers(1, 32, 32, seed=i)), validates=False)
