"""Learning without labels: the heads and losses of lightly, in steps as its examples have them."""
# pyright: reportMissingImports=false

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.program_zoo import Parts, fields, numbers, program, rows


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


def predicted(module: Any, x: Tensor) -> Tensor:
    return module.heads["prediction"](module.embed(x))


def alike(criterion: Any, m: Any, a: Tensor, b: Tensor) -> Tensor:
    return criterion(m.embed(a), m.embed(b))


def siamese(criterion: Any, m: Any, a: Tensor, b: Tensor) -> Tensor:
    first = criterion(m.embed(a).detach(), predicted(m, b))
    return 0.5 * (first + criterion(m.embed(b).detach(), predicted(m, a)))


def bootstrapped(criterion: Any, m: Any, a: Tensor, b: Tensor) -> Tensor:
    first = criterion(predicted(m, a), m.teacher(b).detach())
    return 0.5 * (first + criterion(predicted(m, b), m.teacher(a).detach()))


def taught(criterion: Any, m: Any, a: Tensor, b: Tensor) -> Tensor:
    return criterion(m.embed(a), m.teacher(b).detach())


def views(
    criterion: str,
    heads: dict[str, tuple[str, int, int, int]],
    loss: Callable[..., Tensor] = alike,
    *,
    size: int = 32,
    batch: int = 4,
) -> Parts:
    """Learn from two views of each sample, with a criterion and heads of lightly."""
    import lightly.loss
    from lightly.models import modules

    made = {name: getattr(modules, kind)(*extents) for name, (kind, *extents) in heads.items()}
    measure = partial(loss, getattr(lightly.loss, criterion)())
    module = TwoViews(made, measure, teach=loss in (bootstrapped, taught))
    each = fields(4 * batch, lambda i: numbers(3, size, size, seed=i))
    samples = list(zip(each[: 2 * batch], each[2 * batch :], strict=True))
    return Parts(module, samples, batch=batch, validates=False)


BARLOW = {"projection": ("BarlowTwinsProjectionHead", 512, 64, 64)}
SIMSIAM = {
    "projection": ("SimSiamProjectionHead", 512, 64, 32),
    "prediction": ("SimSiamPredictionHead", 32, 16, 32),
}
BYOL = {
    "projection": ("BYOLProjectionHead", 512, 64, 32),
    "prediction": ("BYOLPredictionHead", 32, 64, 32),
}
program("lightly", name="lightly_barlow_twins", large={"size": 128, "batch": 16})(
    partial(views, "BarlowTwinsLoss", BARLOW)
)
rows(
    "lightly",
    table={
        "lightly_vicreg": partial(views, "VICRegLoss", BARLOW),
        "lightly_simclr": partial(
            views, "NTXentLoss", {"projection": ("SimCLRProjectionHead", 512, 64, 32)}
        ),
        "lightly_simsiam": partial(views, "NegativeCosineSimilarity", SIMSIAM, siamese),
        "lightly_byol": partial(views, "NegativeCosineSimilarity", BYOL, bootstrapped),
        "lightly_moco": partial(
            views, "NTXentLoss", {"projection": ("MoCoProjectionHead", 512, 64, 32)}, taught
        ),
    },
)
