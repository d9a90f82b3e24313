"""Ordinary programs of several kinds, each against one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_shard.checkpoint.state import full_module_state
from tests.trainer.featured import Featured, fit_alone, fit_sharded

SHORT: dict[str, Any] = {
    "limit_train_batches": 3,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
}


class DeepSupervision(Featured):
    """Losses on outputs at several scales."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, 2, 1, dtype=torch.float64)
        self.head = nn.Conv2d(4, 1, 1, dtype=torch.float64)

    def loss(self, batch):
        x, y = batch["x"], batch["y"]
        small = self.head(self.down(x).relu())
        up = F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)
        coarse = F.interpolate(y, size=small.shape[-2:], mode="area")
        return super().loss(batch) + (up - y).abs().mean() + F.mse_loss(small, coarse)


class Physics(Featured):
    """A residual of derivatives with respect to the inputs."""

    def loss(self, batch):
        with torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            u = self(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (u - batch["y"]).square().mean() + (first - second + u.sin()).square().mean()


class Queue(Featured):
    """Contrasts features with a queue of those of former steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.project = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("queue", F.normalize(torch.randn(3, 8, dtype=torch.float64), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.momentum = copy.deepcopy(self.network).requires_grad_(False)

    def loss(self, batch):
        q, k = (
            F.normalize(self.project(net[:3](batch["x"]).mean((2, 3))), dim=1)
            for net in (self.network, self.momentum)
        )
        k = k.detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        if self.training:
            at = int(self.place)
            self.queue[:, at : at + len(k)] = k.T
            self.place[()] = (at + len(k)) % 8
            with torch.no_grad():
                for p, r in zip(self.network.parameters(), self.momentum.parameters(), strict=True):
                    r.mul_(0.9).add_(p, alpha=0.1)
        target = torch.zeros(len(q), dtype=torch.long)
        return F.cross_entropy(logits, target) + super().loss(batch)


class Patches(Featured):
    """A loss of patches, each against its own mean and spread."""

    def loss(self, batch):
        p = F.unfold(self(batch["x"]), (3, 3), stride=2, padding=1)
        t = F.unfold(batch["y"], (3, 3), stride=2, padding=1)
        p, t = (v - v.mean(1, keepdim=True) for v in (p, t))
        return (1 - F.cosine_similarity(p, t, dim=1)).mean() + (p.std(1) - t.std(1)).abs().mean()


class Augmented(Featured):
    """Predicts with flips and turns, and averages."""

    def validation_step(self, batch, batch_idx):
        x = batch["x"]
        views = [self(x), self(x.flip(-1)).flip(-1), self(x.flip(-2)).flip(-2),
                 self(x.transpose(-1, -2)).transpose(-1, -2)]  # fmt: skip
        mean = torch.stack(views).mean(0)
        self.log("spread", torch.stack(views).std(0).mean(), batch_size=len(x), sync_dist=True)
        self.log("val", F.l1_loss(mean, batch["y"]), batch_size=len(x), sync_dist=True)


class Tasks(Featured):
    """Two tasks whose weights follow the norms of their gradients."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        out = self(batch["x"])
        losses = torch.stack([(out - batch["y"]).square().mean(), out.abs().mean()])
        last = self.network[-1].weight
        norms = torch.stack([
            torch.autograd.grad(w * v, last, retain_graph=True, create_graph=True)[0].norm()
            for w, v in zip(self.weights, losses, strict=True)
        ])  # fmt: skip
        balance = (norms - norms.mean().detach()).abs().sum()
        return (self.weights.detach() * losses).sum() + balance


class Adversary(Featured):
    """Two optimizers in turn, by hand, with a penalty of gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, 2, 1)
        ).double()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self(batch["x"])
        second.zero_grad()
        mixed = (0.3 * batch["y"] + 0.7 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = self.critic(made.detach()).mean() - self.critic(batch["y"]).mean() + penalty
        self.manual_backward(loss)
        second.step()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward((made - batch["y"]).abs().mean() - 0.1 * self.critic(made).mean())
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self):
        own = [*self.network.parameters(), self.weight, self.offset]
        return torch.optim.Adam(own, 1e-3), torch.optim.SGD(self.critic.parameters(), 0.01)


class Distilled(Featured):
    """Follows a frozen teacher's features and softened outputs."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False).eval()

    def loss(self, batch):
        with torch.no_grad():
            mid = self.teacher[:3](batch["x"])
            soft = self.teacher[3](mid)
        own = self.network[:3](batch["x"])
        out = self.network[3](own)
        flat = lambda v: (v.flatten(1) / 2).log_softmax(1)  # noqa: E731
        return F.kl_div(flat(out), flat(soft), log_target=True, reduction="batchmean") + (
            F.mse_loss(own, mid) + super().loss(batch)
        )


KINDS = {
    kind.__name__: kind
    for kind in (DeepSupervision, Physics, Queue, Patches, Augmented, Tasks, Adversary, Distilled)
}


def check(name: str, domain: tuple[int, ...]) -> None:
    alone, module = KINDS[name](), KINDS[name]()
    expected = fit_alone(alone, **SHORT)
    runner = fit_sharded(module, domain, **SHORT)
    found = full_module_state(module)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )
    if domain != (1,) and torch.distributed.get_world_size() == domain[0]:
        for key, value in expected.callback_metrics.items():
            torch.testing.assert_close(runner.callback_metrics[key], value, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_as_in_one_process(mesh: str, run_each: Callable[..., None]) -> None:
    # queues and norms of each replica's own samples differ, as under DDP
    apart = {"Queue", "Tasks"} if mesh == "2x2" else set()
    names = [name for name in KINDS if name not in apart]
    run_each(4 if mesh == "2x2" else 2, check, {n: {"name": n, "domain": (2,)} for n in names})
