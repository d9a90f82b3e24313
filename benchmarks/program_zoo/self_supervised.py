"""Learning without labels: the heads and losses of lightly, in steps as its examples have them."""
# pyright: reportMissingImports=false

import copy
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.program_zoo import Parts, fields, numbers, program


class TwoViews(LightningModule):
    """A backbone and heads, a loss of two views, and teachers that follow their students."""

    def __init__(
        self, heads: dict[str, nn.Module], loss: Callable[..., Tensor], teach: bool
    ) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])
        self.heads = nn.ModuleDict(heads)
        self.loss = loss
        if teach:
            self.teacher = copy.deepcopy(
                nn.Sequential(self.backbone, nn.Flatten(), heads["projection"])
            )
            self.teacher.requires_grad_(False)

    def embed(self, x: Tensor) -> Tensor:
        return self.heads["projection"](self.backbone(x).flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if hasattr(self, "teacher"):
            from lightly.models.utils import update_momentum

            update_momentum(self.backbone, self.teacher[0], 0.99)
            update_momentum(self.heads["projection"], self.teacher[2], 0.99)
        loss = self.loss(self, *batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.06)


def views(module: Any, size: int = 32, batch: int = 4) -> Parts:
    each = fields(4 * batch, lambda i: numbers(3, size, size, seed=i))
    samples = list(zip(each[: 2 * batch], each[2 * batch :], strict=True))
    return Parts(module, samples, batch=batch, validates=False)


def predicted(module: Any, x: Tensor) -> Tensor:
    return module.heads["prediction"](module.embed(x))


@program("lightly", large={"size": 128, "batch": 16})
def lightly_barlow_twins(size: int = 32, batch: int = 4) -> Parts:
    from lightly.loss import BarlowTwinsLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    criterion = BarlowTwinsLoss()
    heads = {"projection": BarlowTwinsProjectionHead(512, 64, 64)}
    module = TwoViews(heads, lambda m, a, b: criterion(m.embed(a), m.embed(b)), teach=False)
    return views(module, size, batch)


@program("lightly")
def lightly_vicreg() -> Parts:
    from lightly.loss import VICRegLoss
    from lightly.models.modules import BarlowTwinsProjectionHead

    criterion = VICRegLoss()
    heads = {"projection": BarlowTwinsProjectionHead(512, 64, 64)}
    return views(TwoViews(heads, lambda m, a, b: criterion(m.embed(a), m.embed(b)), teach=False))


@program("lightly")
def lightly_simclr() -> Parts:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    criterion = NTXentLoss()
    heads = {"projection": SimCLRProjectionHead(512, 64, 32)}
    return views(TwoViews(heads, lambda m, a, b: criterion(m.embed(a), m.embed(b)), teach=False))


@program("lightly")
def lightly_simsiam() -> Parts:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

    criterion = NegativeCosineSimilarity()
    heads = {
        "projection": SimSiamProjectionHead(512, 64, 32),
        "prediction": SimSiamPredictionHead(32, 16, 32),
    }

    def loss(m: Any, a: Tensor, b: Tensor) -> Tensor:
        first = criterion(m.embed(a).detach(), predicted(m, b))
        return 0.5 * (first + criterion(m.embed(b).detach(), predicted(m, a)))

    return views(TwoViews(heads, loss, teach=False))


@program("lightly")
def lightly_byol() -> Parts:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead

    criterion = NegativeCosineSimilarity()
    heads = {
        "projection": BYOLProjectionHead(512, 64, 32),
        "prediction": BYOLPredictionHead(32, 64, 32),
    }

    def loss(m: Any, a: Tensor, b: Tensor) -> Tensor:
        first = criterion(predicted(m, a), m.teacher(b).detach())
        return 0.5 * (first + criterion(predicted(m, b), m.teacher(a).detach()))

    return views(TwoViews(heads, loss, teach=True))


@program("lightly")
def lightly_moco() -> Parts:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead

    criterion = NTXentLoss()
    heads = {"projection": MoCoProjectionHead(512, 64, 32)}
    return views(
        TwoViews(heads, lambda m, a, b: criterion(m.embed(a), m.teacher(b).detach()), teach=True)
    )
