"""Programs with the habits of research code that look odd, and are right on ranks of a domain."""

import random
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.trainer.research_programs import Research, net, pairs
from tests.training import Fields


class Habit(Research):
    """Runs two epochs, since some of them keep what the first one has left."""

    epochs = 2


class CachedGrids(Habit):
    """Coordinates and windows that are computed once for a shape, and fields of the last step."""

    def build(self) -> None:
        self.net = net(4, 4, 1)
        self.grids: dict[Any, Tensor] = {}
        self.last: Tensor | None = None

    def grid(self, x: Tensor) -> Tensor:
        key = (*x.shape[-2:], x.dtype, str(x.device))
        if key not in self.grids:
            rows, columns = (torch.linspace(0, 1, n, dtype=x.dtype) for n in x.shape[-2:])
            self.grids[key] = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))[None]
        return self.grids[key].expand(len(x), -1, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        last = torch.zeros_like(x) if self.last is None else self.last
        made = self.net(torch.cat([x, self.grid(x), last], 1))
        self.last = made.detach()
        window = torch.from_numpy(np.hanning(x.shape[-1] + 2)[1:-1].copy())
        return made * window


class FeaturesInDicts(Habit):
    """Levels by their names, skips that are popped, and losses of all levels."""

    def build(self) -> None:
        self.down = nn.ModuleList([net(1, 4), net(4, 6)])
        self.up = nn.ModuleList([net(10, 4), net(5, 4)])
        self.heads = nn.ModuleDict({"coarse": nn.Conv2d(4, 1, 1), "fine": nn.Conv2d(4, 1, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # pyright: ignore
        skips, found, h = [x], {}, x
        for block in self.down:
            h = block(F.avg_pool2d(h, 2, ceil_mode=True))
            skips.append(h)
        h = F.adaptive_avg_pool2d(skips.pop(), 2)
        for (name, head), block in zip(self.heads.items(), self.up, strict=True):
            skip = skips.pop()
            h = F.interpolate(h, skip.shape[-2:], mode="bilinear", align_corners=False)
            h = block(torch.cat([skip, h], 1))
            found[name] = head(h)
        return found

    def loss(self, batch: Any) -> Tensor:
        losses = defaultdict(float)
        for n, (name, value) in enumerate(self(batch["x"]).items()):
            target = F.interpolate(batch["y"], value.shape[-2:], mode="area")
            losses[name] += 0.5**n * F.l1_loss(value, target)  # pyright: ignore
        self.log_dict({f"of_{k}": v for k, v in losses.items()}, batch_size=2, sync_dist=True)
        return sum(losses.values())  # pyright: ignore


class Dropped(Habit):
    """Layers that `random` leaves out, samples that torch leaves out, and recomputed blocks."""

    is_per_sample = False

    def build(self) -> None:
        self.lift, self.head = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(net(4, 4), nn.Dropout2d(0.2), net(4, 4)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        for n, block in enumerate(self.blocks):
            if self.training and random.random() < 0.3:
                continue
            made = checkpoint(block, h, use_reentrant=bool(n % 2)) if self.training else block(h)
            if self.training:
                keep = torch.rand(len(h), 1, 1, 1, dtype=h.dtype) < 0.8
                made = made * keep / 0.8  # pyright: ignore
            h = h + made
        return self.head(h)


class DrawnByNumPy(Habit):
    """Augmentations by `numpy.random`: two of a list, their strengths, and mixed samples."""

    is_per_sample = False

    def augmented(self, x: Tensor) -> Tensor:
        strength = np.random.uniform(0.1, 0.9)  # noqa: NPY002 - as such code draws
        kinds = [
            lambda x: x.flip(-1),
            lambda x: x.roll((int(8 * strength), 1), (-1, -2)),
            lambda x: x * strength + x.mean((-2, -1), keepdim=True) * (1 - strength),
            lambda x: (x - x.amin()) / (x.amax() - x.amin() + 1e-6),
            lambda x: x.clamp(-strength, strength),
            lambda x: x.rot90(2, (-2, -1)),
        ]
        for n in np.random.choice(len(kinds), 2, replace=False):  # noqa: NPY002
            x = kinds[n](x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.augmented(batch["x"]), batch["y"]
        share = np.random.beta(0.4, 0.4)  # noqa: NPY002
        order = np.random.permutation(len(x))  # noqa: NPY002
        made = self(share * x + (1 - share) * x[order])
        loss = share * F.mse_loss(made, y) + (1 - share) * F.mse_loss(made, y[order])
        self.report("loss", loss)
        return loss


class FirstRankLooks(Habit):
    """Progress and samples of the first rank alone: numbers, words, and a sample by chance."""

    is_per_sample = False

    def build(self) -> None:
        super().build()
        self.said: list[str] = []
        self.kept: list[Tensor] = []

    @rank_zero_only
    def show(self, x: Tensor, loss: Tensor) -> None:
        place = random.randrange(len(x)) + np.random.randint(3)  # noqa: NPY002
        self.said.append(f"{place} {tuple(x.shape)} {x.dtype} {x.device} {x.requires_grad}")
        self.said.append(f"{loss.detach().item():.3f} {loss} {x.ndim} {x.numel()} {x.grad_fn}")
        self.kept = [*self.kept[-2:], x.detach()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        began = time.perf_counter()
        x = batch["x"]
        if random.random() < 0.5:
            x = x.flip(-1)
        made = self(x + 0.1 * float(np.random.rand()))  # noqa: NPY002
        loss = F.mse_loss(made, batch["y"])
        self.show(made, loss)
        if self.trainer.is_global_zero and self.global_rank == 0:
            self.said.append(f"step {self.global_step}: {float(loss):.4f}")
            torch.randn(())
        self.report("loss", loss)
        self.log("seconds", time.perf_counter() - began, batch_size=2)
        self.log("of_rank_zero", loss.detach(), rank_zero_only=True, batch_size=2)
        return loss

    def fit(self, trainer: Trainer, size: int) -> None:
        def augmented(index: int) -> dict[str, Tensor]:
            return {k: v * random.uniform(0.5, 2) for k, v in pairs(index).items()}

        trainer.fit(self, DataLoader(Fields(augmented, 12), size, shuffle=True))


class GradientHooks(Habit):
    """Hooks that scale, cut and record gradients of features, inputs and parameters."""

    is_per_sample = False

    def build(self) -> None:
        self.net = net(1, 4, 4, 1)
        self.seen: dict[str, float] = {}
        self.net[2].register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))
        for p in self.net[0].parameters():
            p.register_hook(lambda g: g.clamp(-0.05, 0.05))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        features = self.net[:3](x)
        if features.requires_grad:
            features.register_hook(lambda g: g / (g.abs().amax() + 1e-3))
            features.retain_grad()
        made = self.net[3:](features)
        loss = F.mse_loss(made, batch["y"])
        if features.requires_grad:
            (g,) = torch.autograd.grad(made.sum(), features, retain_graph=True)
            cam = F.relu((g.mean((2, 3), keepdim=True) * features.detach()).sum(1, keepdim=True))
            loss = loss + 0.01 * (made * cam).mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm(), batch_size=2)


class Adversary(Habit):
    """A GAN with a pool of former images, a gradient penalty, and two optimizers."""

    is_per_sample = False

    def build(self) -> None:
        self.automatic_optimization = False
        self.net = net(1, 4, 1)
        self.critic = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3)),
                                    nn.SiLU(), nn.Conv2d(4, 1, 3))  # fmt: skip
        self.pool: list[Tensor] = []

    def pooled(self, fake: Tensor) -> Tensor:
        found = []
        for image in fake.detach():
            if len(self.pool) < 4:
                self.pool.append(image)
                found.append(image)
            elif random.uniform(0, 1) > 0.5:
                place = random.randint(0, 3)
                found.append(self.pool[place].clone())
                self.pool[place] = image
            else:
                found.append(image)
        return torch.stack(found)

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, 1, 1, dtype=real.dtype)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (g,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return (g.flatten(1).norm(dim=1) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()  # pyright: ignore
        fake = self.net(batch["x"])
        self.toggle_optimizer(judges)
        old = self.pooled(fake)
        real = self.critic(batch["y"])
        cost = F.relu(1 - real).mean() + F.relu(1 + self.critic(old)).mean()
        cost = cost + 10 * self.penalty(batch["y"], old)
        judges.zero_grad()
        self.manual_backward(cost)
        judges.step()
        self.untoggle_optimizer(judges)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(makes)
            gain = -self.critic(fake).mean() + F.l1_loss(fake, batch["y"])
            makes.zero_grad()
            self.manual_backward(gain)
            self.clip_gradients(makes, 1.0, "norm")
            makes.step()
            self.untoggle_optimizer(makes)
            self.report("gain", gain)
        self.report("cost", cost)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), 0.01) for m in (self.net, self.critic)]


class RunningNorm(nn.Module):
    """Subtracts and divides by means over past steps, of values that are not too far off."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("square", torch.ones(1, channels, 1, 1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.scale = torch.ones(1)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.steps += 1
                rate = max(0.1, 1 / self.steps.item())
                self.mean.lerp_(x.mean((0, 2, 3), keepdim=True), rate)
                self.square.lerp_(x.square().mean((0, 2, 3), keepdim=True), rate)
                self.scale = 0.9 * self.scale.to(x) + 0.1 * x.std()
        spread = (self.square - self.mean.square()).clamp_min(1e-3).sqrt()
        return (x - self.mean) / spread / self.scale.to(x)


class Balanced(Habit):
    """Running norms, and losses that are weighed by their own running means, as numbers."""

    is_per_sample = False

    def build(self) -> None:
        self.net = nn.Sequential(net(1, 4), RunningNorm(4), nn.SiLU(), nn.Conv2d(4, 1, 1))
        self.means: dict[str, float] = {}
        self.logs = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in ("l1", "tv")})
        self.worst = -1.0

    def loss(self, batch: Any) -> Tensor:
        made = self(batch["x"])
        losses = {"l1": F.l1_loss(made, batch["y"]), "tv": made.diff(dim=-1).abs().mean()}
        for name, value in losses.items():
            mean = self.means.get(name, value.item())
            self.means[name] = 0.9 * mean + 0.1 * value.item()
        if losses["l1"].item() > self.worst:
            self.worst = losses["l1"].item()
        weighed = [
            (-self.logs[k]).exp() * (v / self.means[k]) + self.logs[k] for k, v in losses.items()
        ]
        return torch.stack(weighed).sum() + 0.01 * (made * self.worst).square().mean()


class Quantized(Habit):
    """A codebook of moving means with dead codes replaced by chance, as of VQ-VAE."""

    is_per_sample = False

    def build(self) -> None:
        self.encoder, self.decoder = net(1, 4, 4), net(4, 4, 1)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x).permute(0, 2, 3, 1)
        far = (h[..., None, :] - self.codes).square().sum(-1)
        chosen = F.one_hot(far.argmin(-1), 6).to(h.dtype)
        found = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum((0, 1, 2)), alpha=0.1)
                self.sums.mul_(0.9).add_(torch.einsum("bhwk,bhwc->kc", chosen, h), alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp_min(1e-3)[:, None])
                dead = self.counts < 0.05
                if dead.any():
                    self.codes[dead] += 0.1 * torch.randn_like(self.codes[dead])
        self.commitment = F.mse_loss(h, found.detach())
        return self.decoder((h + (found - h).detach()).permute(0, 3, 1, 2))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.25 * self.commitment


class SelfConditioned(Habit):
    """Diffusion that half of the time is given its own estimate, computed without gradients."""

    is_per_sample = False

    def build(self) -> None:
        self.net = net(3, 4, 1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 20), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        y = batch["y"]
        t = torch.randint(0, len(self.alphas), (len(y),))
        a = self.alphas[t].view(-1, 1, 1, 1)
        noise = torch.randn_like(y)
        noisy = a.sqrt() * y + (1 - a).sqrt() * noise
        guess = torch.zeros_like(noisy)
        if random.random() < 0.5:
            with torch.no_grad():
                guess = self.net(torch.cat([noisy, batch["x"], guess], 1)).detach()
        found = self.net(torch.cat([noisy, batch["x"], guess], 1))
        each = (found - noise).square().flatten(1).mean(1)
        return (each * (1 / (1 - a).flatten()).clamp(max=5)).mean()


class Compiled(Habit):
    """A block that torch.compile traces, scopes of a profiler, and an adapted copy inside."""

    is_per_sample = False

    def build(self) -> None:
        self.net = net(1, 4, 1)
        self.block = torch.compile(net(1, 4, 1), backend="eager")

    def loss(self, batch: Any) -> Tensor:
        with torch.profiler.record_function("adapt"):
            named = dict(self.net.named_parameters())
            inner = F.mse_loss(self.net(batch["x"]), batch["y"])
            if torch.is_grad_enabled():
                found = torch.autograd.grad(inner, [*named.values()], create_graph=True)
                named = {k: p - 0.1 * g for (k, p), g in zip(named.items(), found, strict=True)}
            made = torch.func.functional_call(self.net, named, (batch["x"],))
        with torch.profiler.record_function("block"):
            return F.mse_loss(made + self.block(batch["x"]), batch["y"])


HABITS: dict[str, type[Research]] = {kind.__name__: kind for kind in Habit.__subclasses__()}
