"""Each feature of the Trainer gives what it gives on one process, on any mesh."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.pairs import choose
from tests.reference import computed_once
from tests.trainer.featured import (
    Featured,
    assert_same_metrics,
    assert_same_state,
    fit_alone,
    fit_sharded,
)


class Manual(Featured):
    """Two optimizers, of which each has its turn; as in adversarial training."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        inner = torch.optim.Adam(self.network.parameters(), lr=1e-2)
        outer = torch.optim.SGD([self.weight, self.offset], lr=1e-2)
        return [inner, outer], [torch.optim.lr_scheduler.StepLR(o, 2) for o in (inner, outer)]


class Toggled(Manual):
    """Gradients of one turn are kept for the next: parameters that are off must get none."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        inner, outer = self.optimizers()
        for optimizer in (inner, outer):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            self.untoggle_optimizer(optimizer)
        for optimizer in (inner, outer):
            optimizer.step()
            optimizer.zero_grad()


class Delayed(Manual):
    """Gradients of the step before are taken, before the loss of this one."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Projected(Delayed):
    """Gradients of two losses, of which one is projected on the other, are assigned."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        weights, smooth = [*self.parameters()], self.network(batch["x"]).diff(dim=-1)
        losses = (self.loss(batch), smooth.square().mean())
        flat: list[torch.Tensor] = []
        for loss in losses:
            found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            pairs = zip(found, weights, strict=True)
            flat.append(
                torch.cat([(torch.zeros_like(w) if g is None else g).ravel() for g, w in pairs])
            )
        first, second = flat
        first = first - (first @ second) / second.square().sum() * second
        parts = (first + second).split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight).clone()
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        self.log("loss", self.loss(batch))


class Adversarial(Manual):
    """Two networks that are called by themselves, not through the module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Conv2d(1, 2, 3, dtype=torch.float64)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        painter, critic = self.optimizers()
        for optimizer, sign in ((painter, 1), (critic, -1)):
            self.toggle_optimizer(optimizer)
            painted = self.network(batch["x"]) * self.weight.mean()
            judged = self.critic(painted) - self.critic(batch["y"])
            optimizer.zero_grad()
            self.manual_backward(sign * judged.square().mean() + painted.square().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        inner = [*self.network.parameters(), self.weight]
        return [torch.optim.SGD(p, lr=0.02) for p in (inner, self.critic.parameters())]


class Normed(Featured):
    """Logs norms of gradients, which are sharded, as Lightning documents it."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log_dict(grad_norm(self.network, "inf"), on_step=True, on_epoch=True)
        self.log("norm", self.weight.grad.norm(), prog_bar=True)


class Scheduled(Featured):
    def __init__(self, make: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}


class PartlyFrozen(Featured):
    """Parameters that are frozen from the start, for BackboneFinetuning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.network[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def one_cycle(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    return {"scheduler": scheduler, "interval": "step"}


def plateau(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {"scheduler": scheduler, "monitor": "val_loss"}


@dataclass
class Feature:
    """What a row of the table trains."""

    make: Callable[[], LightningModule] = Featured
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    domain_only: bool = False  # batch statistics of data replicas differ from those of one process


FEATURES = {
    "plain": Feature(),
    "clip_norm": Feature(options={"gradient_clip_val": 0.05}),
    "clip_value": Feature(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation_that_does_not_divide": Feature(options={"accumulate_grad_batches": 4}),
    "accumulation_by_epoch": Feature(
        options={"max_epochs": 3}, callbacks=lambda: [GradientAccumulationScheduler({1: 2, 2: 5})]
    ),
    "manual_optimization": Feature(Manual),
    "toggled_optimizers": Feature(Toggled),
    "adversarial": Feature(Adversarial),
    "norms_of_gradients": Feature(Normed, {"enable_progress_bar": True}),
    "delayed_step": Feature(Delayed),
    "assigned_gradients": Feature(Projected, domain_only=True),
    "synced_batch_norm": Feature(
        lambda: Featured(torch.nn.BatchNorm2d), {"sync_batchnorm": True}, domain_only=True
    ),
    "schedule_by_step": Feature(lambda: Scheduled(one_cycle), {"max_epochs": 2}),
    "schedule_on_plateau": Feature(lambda: Scheduled(plateau), {"max_epochs": 3}),
    "batch_norm": Feature(lambda: Featured(nn.BatchNorm2d), {"max_epochs": 2}, domain_only=True),
    "ema": Feature(options={"max_epochs": 2}, callbacks=lambda: [EMAWeightAveraging(decay=0.8)]),
    "ema_with_buffers": Feature(
        lambda: Featured(nn.BatchNorm2d),
        {"max_epochs": 2},
        lambda: [EMAWeightAveraging(decay=0.8)],
        domain_only=True,
    ),
    "average": Feature(options={"max_epochs": 2}, callbacks=lambda: [WeightAveraging()]),
    "swa": Feature(
        options={"max_epochs": 4}, callbacks=lambda: [StochasticWeightAveraging(0.01, 2)]
    ),
    "swa_with_batch_norm": Feature(
        lambda: Featured(nn.BatchNorm2d),
        {"max_epochs": 4},
        lambda: [StochasticWeightAveraging(0.01, 2)],
        domain_only=True,
    ),
    "early_stopping": Feature(
        options={"max_epochs": 9},
        callbacks=lambda: [EarlyStopping("val_loss", min_delta=0.01, patience=1)],
    ),
    "overfit_batches": Feature(options={"overfit_batches": 2, "max_epochs": 3}),
    "limits": Feature(
        options={"limit_train_batches": 3, "limit_val_batches": 2, "val_check_interval": 2}
    ),
    "no_sanity_check": Feature(options={"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}),
    "fast_dev_run": Feature(options={"fast_dev_run": 2}),
    "finetuning": Feature(
        PartlyFrozen,
        {"max_epochs": 3},
        lambda: [BackboneFinetuning(1, backbone_initial_ratio_lr=0.5, train_bn=False)],
    ),
    "detect_anomaly": Feature(options={"detect_anomaly": True}),
}


class Rates(Callback):
    """The learning rates of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        self.values += [group["lr"] for group in groups]


@computed_once
def alone(name: str) -> dict[str, Any]:
    """What the row's training gives under Lightning's own strategy for one process."""
    feature, rates = FEATURES[name], Rates()
    module, callbacks = feature.make(), [*feature.callbacks(), rates]
    runner = fit_alone(module, **feature.options, callbacks=callbacks)
    return {
        "steps": (runner.global_step, runner.current_epoch), "rates": rates.values,
        "metrics": dict(runner.callback_metrics), "state": module.state_dict(),
    }  # fmt: skip


def check(name: str, domain: tuple[int, ...]) -> None:
    feature, rates = FEATURES[name], Rates()
    if feature.domain_only and torch.tensor(domain).prod() < dist.get_world_size():
        domain = (dist.get_world_size(),)
    expected, module = alone(name), feature.make()
    callbacks = [*feature.callbacks(), rates]
    runner = fit_sharded(module, domain, **feature.options, callbacks=callbacks)
    assert (runner.global_step, runner.current_epoch) == expected["steps"]
    assert rates.values == pytest.approx(expected["rates"], rel=1e-12)
    assert_same_metrics(runner, expected["metrics"])
    assert_same_state(module, expected["state"])


MESHES = [
    pytest.param((2,), marks=pytest.mark.spmd(4), id="2x2"),
    pytest.param((2,), marks=pytest.mark.spmd(2), id="1x2"),
    pytest.param((1,), marks=pytest.mark.spmd(2), id="2x1"),
]


@pytest.mark.parametrize(("name", "domain"), choose(FEATURES, MESHES))
def test_on_each_mesh_by_turns(name, domain):
    check(name, domain)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (4,), (2, 2)], ids=["4x1", "1x4", "1x(2x2)"])
@pytest.mark.parametrize("name", FEATURES)
def test_on_other_meshes(name, domain):
    check(name, domain)
