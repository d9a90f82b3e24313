"""Programs as research code has them: the kinds that a stranger brings, each in a few lines."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection, classification, regression
from torchvision.transforms import v2

from tests.training import Fields, generator


def pairs(index: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, 1, 9, 8, generator=generator(index), dtype=torch.float64)
    return {"x": x, "y": y}


def videos(index: int) -> dict[str, Tensor]:
    x = torch.randn(4, 2, 9, 6, generator=generator(index), dtype=torch.float64)
    return {"clip": x, "label": torch.tensor(index % 3)}


def net(*channels: int, norm: bool = False) -> nn.Sequential:
    """Convolutions with activations between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(channels):
        layers += [nn.Conv2d(a, b, 3, padding=1), *([nn.BatchNorm2d(b)] if norm else []), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class Research(LightningModule):
    """A network of fields in float64, which logs its loss in training and validation."""

    sample: Callable[[int], Any] = staticmethod(pairs)
    strategy: ClassVar[dict[str, Any]] = {}
    callbacks: tuple[Callable[[], Callback], ...] = ()
    is_per_sample = True  # replicas see what one process sees
    epochs = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.build()
        self.double()

    def build(self) -> None:
        self.net = net(1, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["y"])

    def report(self, name: str, value: Any, **how: Any) -> None:
        self.log(name, value, sync_dist=True, batch_size=2, **how)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.report("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.report("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def fit(self, trainer: Trainer, size: int) -> None:
        data = DataLoader(Fields(type(self).sample, 12), size)
        trainer.fit(self, data, data)


class AugmentedInTheHook(Research):
    """Transforms after the transfer, as of kornia: turns, flips and erased boxes of each sample."""

    is_per_sample = False  # the numbers are those of a batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        x = torch.stack([batch["x"], batch["y"]], 2).flatten(1, 2)
        turn = torch.rand(len(x), dtype=x.dtype) * 0.4 - 0.2
        theta = torch.stack([turn.cos(), -turn.sin(), 0 * turn, turn.sin(), turn.cos(), 0 * turn])
        grid = F.affine_grid(theta.T.reshape(-1, 2, 3), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid.to(x), padding_mode="reflection", align_corners=False)
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-2), x)
        rows, columns = torch.arange(9)[:, None], torch.arange(8)
        low = torch.randint(0, 5, (len(x), 1, 1, 1, 2))
        box = (rows >= low[..., 0]) & (rows < low[..., 0] + 3) & (columns >= low[..., 1])
        x = x.masked_fill(box, 0.0)
        x = v2.Normalize([0.1, 0.2], [1.5, 0.5])(v2.RandomVerticalFlip(1.0)(x))
        return {"x": x[:, :1], "y": x[:, 1:]}


class ListStates(Research):
    """Metrics that keep all values, in a dict of collections that are clones with prefixes."""

    def build(self) -> None:
        super().build()
        found = MetricCollection({
            "auroc": classification.BinaryAUROC(),
            "ap": classification.BinaryAveragePrecision(thresholds=None),
            "spearman": regression.SpearmanCorrCoef(),
            "mean": torchmetrics.CatMetric(),
        }, compute_groups=False)  # fmt: skip
        self.metrics = nn.ModuleDict({
            "train_": found.clone(prefix="train/"), "val_": found.clone(prefix="val/")
        })  # fmt: skip

    def update(self, batch: Any, stage: str) -> None:
        out, y = self(batch["x"]).detach().flatten(), batch["y"].flatten()
        metrics: Any = self.metrics[stage]
        metrics["auroc"].update(out.sigmoid(), (y > 0).long())
        metrics["ap"].update(out.sigmoid(), (y > 0).long())
        metrics["spearman"].update(out, y)
        metrics["mean"].update((out - y).square())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.update(batch, "train_")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.update(batch, "val_")

    def end(self, stage: str) -> None:
        metrics: Any = self.metrics[stage]
        values = metrics.compute()
        self.log_dict({k: v.double().mean() for k, v in values.items()})
        metrics.reset()

    def on_train_epoch_end(self) -> None:
        self.end("train_")

    def on_validation_epoch_end(self) -> None:
        self.end("val_")


class Averaged(Research):
    """Weights that Lightning averages."""

    is_per_sample = False  # of a batch norm
    callbacks = (lambda: EMAWeightAveraging(decay=0.6),)

    def build(self) -> None:
        self.net = net(1, 4, 1, norm=True)


class SwapWeights(Callback):
    """An average by hand, which validates in place of the weights and is saved beside them."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = {k: p.detach().clone() for k, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for k, p in pl_module.named_parameters():
                self.kept[k].mul_(0.7).add_(p.detach(), alpha=0.3)

    def swap(self, module: LightningModule) -> None:
        with torch.no_grad():
            for k, p in module.named_parameters():
                value = p.detach().clone()
                p.copy_(self.kept[k])
                self.kept[k] = value

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.seen = {
            k: float(v.norm() if type(v) is Tensor else v.full_tensor().norm())
            for k, v in self.kept.items()
        }


class AveragedByHand(Research):
    callbacks = (SwapWeights,)

    def build(self) -> None:
        self.net = net(1, 4, 4, 1)


class Video(Research):
    """Classifies clips (B, T, C, H, W), frame by frame and then over time."""

    sample = staticmethod(videos)
    strategy: ClassVar = {"shard_dims": {"clip": 3}}

    def build(self) -> None:
        self.frames, self.time = net(2, 4, 4), nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def loss(self, batch: Any) -> Tensor:
        b, t = batch["clip"].shape[:2]
        seen = self.frames(batch["clip"].flatten(0, 1)).mean((2, 3)).unflatten(0, (b, t))
        moved = (batch["clip"][:, 1:] - batch["clip"][:, :-1]).abs().mean()
        return F.cross_entropy(self.head(self.time(seen)[0][:, -1]), batch["label"]) + moved


class TwoPlayers(Research):
    """A GAN with two optimizers by hand, spectral norm, and labels of noise."""

    is_per_sample = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        start = nn.Linear(5, 4 * 9 * 8), nn.Unflatten(1, (4, 9, 8))
        self.make = nn.Sequential(*start, *net(4, 4, 1))
        norm = nn.utils.parametrizations.spectral_norm
        self.judge = nn.Sequential(norm(nn.Conv2d(1, 4, 3, 2)), nn.LeakyReLU(0.2), nn.Flatten())
        self.last = nn.Linear(48, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        y = batch["y"]
        noise = torch.randn(len(y), 5, dtype=y.dtype)
        judged = lambda x: self.last(self.judge(x))  # noqa: E731
        made = self.make(noise)
        real, fake = judged(y), judged(made.detach())
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        wanted = F.softplus(-judged(made)).mean()
        first.zero_grad()
        self.manual_backward(wanted)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.log_dict({"d": loss.detach(), "g": wanted.detach()}, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.report("val", self.last(self.judge(batch["y"])).mean())

    def configure_optimizers(self) -> Any:
        both = [*self.judge.parameters(), *self.last.parameters()]
        return torch.optim.Adam(self.make.parameters(), 1e-3), torch.optim.RMSprop(both, 1e-3)


class Diffusion(Research):
    """Learns the noise, keeps an average of the network, and draws samples in validation."""

    is_per_sample = False

    def build(self) -> None:
        self.net = net(2, 6, 1)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("levels", torch.linspace(0.99, 0.05, 6))

    def predict(self, network: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        time = (t.to(x) / 6)[:, None, None, None].expand_as(x)
        return network(torch.cat([x, time], 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = batch["y"]
        t = torch.randint(0, 6, (len(y),))
        level = self.levels[t][:, None, None, None]
        noise = torch.randn_like(y)
        x = level.sqrt() * y + (1 - level).sqrt() * noise
        loss = F.mse_loss(self.predict(self.net, x, t), noise)
        self.report("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for a, p in zip(self.average.parameters(), self.net.parameters(), strict=True):
            a.data.lerp_(p.data, 0.3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = torch.randn_like(batch["y"])
        for i in reversed(range(1, 6)):
            t = torch.full((len(x),), i)
            e = self.predict(self.average, x, t)
            now, then = self.levels[i], self.levels[i - 1]
            first = ((x - (1 - now).sqrt() * e) / now.sqrt()).clamp(-3, 3)
            x = then.sqrt() * first + (1 - then).sqrt() * e
        self.report("spread", x.std())
        self.report("top", x.abs().amax())


class PhysicsInformed(Research):
    """A residual with second derivatives by the coordinates, which are inputs of the network."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    @torch.enable_grad()
    def loss(self, batch: Any) -> Tensor:
        v = batch["x"][:, 0]
        rows = torch.linspace(0, 1, 9, dtype=v.dtype)[:, None].expand(9, 8)
        columns = torch.linspace(0, 1, 8, dtype=v.dtype).expand(9, 8)
        t, s = ((c + 0 * v).requires_grad_() for c in (rows, columns))
        u = self.net(torch.stack([t, s, v], -1))[..., 0]
        slope = lambda a, b: torch.autograd.grad(a.sum(), b, create_graph=True)[0]  # noqa: E731
        u_t, u_s = slope(u, t), slope(u, s)
        residual = u_t + u * u_s - self.viscosity.exp() * slope(u_s, s)
        start = (u[:, 0] - v[:, 0]).square().mean()
        return residual.square().mean() + start + (u[:, :, 0] - u[:, :, -1]).square().mean()


class Rollout(Research):
    """A step of a neural operator, unrolled, with gradients through all steps but some."""

    def build(self) -> None:
        self.lift, self.lower = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
        self.real = nn.Parameter(torch.randn(4, 4, 3, 3) / 8)
        self.imaginary = nn.Parameter(torch.randn(4, 4, 3, 3) / 8)
        self.skip = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        modes = torch.fft.rfft2(h)[..., :3, :3]
        weight = torch.complex(self.real, self.imaginary)
        mixed = torch.zeros(len(x), 4, 9, 5, dtype=modes.dtype)
        mixed[..., :3, :3] = torch.einsum("bixy,ioxy->boxy", modes, weight)
        return x + self.lower(F.gelu(torch.fft.irfft2(mixed, s=(9, 8)) + self.skip(h)))

    def loss(self, batch: Any) -> Tensor:
        x, losses = batch["x"], []
        for i in range(4):
            x = self(x.detach() if i == 2 else x)
            target = batch["y"].roll(i, -2)
            scale = target.flatten(1).norm(dim=1)
            losses.append(((x - target).flatten(1).norm(dim=1) / scale).mean())
        frames = torch.stack(losses)
        return (frames * frames.new_tensor([1, 0.9, 0.8, 0.7])).sum()


class MemoryBank(Research):
    """Contrasts each sample with a bank of those of former steps, gathered from all replicas."""

    is_per_sample = False  # each replica's samples stand together in the bank

    def build(self) -> None:
        self.net = net(1, 4, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("bank", F.normalize(torch.randn(12, 3), dim=1))
        self.register_buffer("seen", torch.zeros(12, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = F.normalize(self.head(self.net(batch["x"]).amax((2, 3))), dim=1)
        key = F.normalize(self.head(self.net(batch["y"]).mean((2, 3))), dim=1)
        every = self.all_gather(key.detach()).reshape(-1, 3)
        own = (z * key).sum(1, keepdim=True)
        loss = F.cross_entropy(torch.cat([own, z @ self.bank.T.clone()], 1) / 0.3,
                               torch.zeros(len(z), dtype=torch.long))  # fmt: skip
        places = torch.arange(len(every)) + 4 * batch_idx
        self.bank[places % 12] = every
        self.seen.index_add_(0, places % 12, torch.ones_like(places))
        self.report("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = F.normalize(self.head(self.net(batch["x"]).amax((2, 3))), dim=1)
        near = (z @ self.bank.T).topk(3, dim=1)
        self.report("nearest", near.values.mean())
        self.report("place", near.indices.double().mean())


class Distillation(Research):
    """A student follows the attention maps of a frozen teacher, which hooks record."""

    is_per_sample = False  # of a batch norm

    def build(self) -> None:
        self.teacher = net(1, 6, 6, 1, norm=True).eval().requires_grad_(False)
        self.net = net(1, 3, 3, 1, norm=True)
        self.maps: dict[str, Tensor] = {}
        for name, network in (("teacher", self.teacher), ("own", self.net)):
            network[4].register_forward_hook(
                lambda _, __, out, name=name: self.maps.__setitem__(name, out)
            )

    def train(self, mode: bool = True) -> "Distillation":
        super().train(mode)
        self.teacher.eval()
        return self

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            soft = self.teacher(batch["x"])
        out = self.net(batch["x"])
        a, b = (F.normalize(self.maps[k].square().mean(1).flatten(1)) for k in ("own", "teacher"))
        return F.huber_loss(out, soft) + (a - b).square().sum(1).mean()


class Ensemble(Research):
    """Five members in one module, each with its own optimizer's group, and their spread."""

    def build(self) -> None:
        self.members = nn.ModuleList([net(1, 3, 2) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        mean, log_var = torch.stack([m(batch["x"]) for m in self.members]).unbind(2)
        y = batch["y"][:, 0].expand_as(mean)
        own = F.gaussian_nll_loss(mean, y, F.softplus(log_var) + 0.1)
        self.report("spread", mean.var(0, unbiased=False).mean())
        return own

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": m.parameters(), "lr": 0.01 * (i + 1)} for i, m in enumerate(self.members)
        ]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02, 0.03], 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Mixed(Research):
    """Mixup or cutmix of the samples of a batch, at random."""

    is_per_sample = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        order = torch.randperm(len(x))
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        if batch_idx % 2:
            x, y = (share * v + (1 - share) * v[order] for v in (x, y))
        else:
            high, wide = (int(n * math.sqrt(1 - share)) for n in x.shape[-2:])
            top, left = int(torch.randint(9, ())), int(torch.randint(8, ()))
            x, y = x.clone(), y.clone()
            rows, columns = slice(top, top + high), slice(left, left + wide)
            x[:, :, rows, columns] = x[order][:, :, rows, columns]
            y[..., rows, columns] = y[order, :, rows, columns]
        loss = F.smooth_l1_loss(self(x), y)
        self.report("loss", loss)
        return loss


class Curriculum(Research):
    """Resolution grows from epoch to epoch, the learning rate falls with it."""

    epochs = 3

    def loss(self, batch: Any) -> Tensor:
        extent = (3 + 3 * self.current_epoch, 4 + 2 * self.current_epoch)
        x, y = (
            F.interpolate(batch[k], extent, mode="bilinear", antialias=True) for k in ("x", "y")
        )
        self.report("rows", float(x.shape[-2]))
        return F.l1_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.3)]


class SeveralLoaders(Research):
    """Several loaders of validation, dicts and confusion matrices, and what they predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Tensor]] = [[], []]
        self.matrix = classification.MulticlassConfusionMatrix(3)
        self.drawn = 0.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self(batch["x"])
        self.log_dict(
            {"mae": F.l1_loss(out, batch["y"]), "bias": (out - batch["y"]).mean()},
            sync_dist=True, batch_size=len(out),
        )  # fmt: skip
        level = lambda v: (v.detach().sign() + 1).long()  # noqa: E731
        self.matrix.update(level(out), level(batch["y"]))
        self.kept[dataloader_idx].append(out)

    def on_validation_epoch_end(self) -> None:
        matrix = self.matrix.compute()
        self.log_dict({f"hits_{i}": matrix[i, i].double() for i in range(3)})
        self.matrix.reset()
        for number, kept in enumerate(self.kept):
            picture = torch.cat(kept).detach()[0, 0].cpu().numpy()
            self.drawn += float(picture[1:7].sum()) * (number + 1)
            kept.clear()
        if self.is_per_replica:
            return
        self.log("drawn", self.drawn)

    is_per_replica = False

    def fit(self, trainer: Trainer, size: int) -> None:
        self.is_per_replica = size < 4  # samples of a batch in one process
        first, other = (DataLoader(Fields(pairs, n), size) for n in (8, 4))
        trainer.fit(self, first, [first, other])


class SuperResolution(Research):
    """Enlarges by pixel shuffle, with a perceptual loss of the layers of a VGG."""

    def build(self) -> None:
        from torchvision.models import vgg11

        self.net = nn.Sequential(*net(1, 4, 4), nn.PixelShuffle(2))
        self.vgg = vgg11(weights=None).features[:8].eval().requires_grad_(False)
        for p in self.vgg.parameters():
            p.data.normal_(0, 0.05, generator=generator(1))

    def loss(self, batch: Any) -> Tensor:
        small = F.avg_pool2d(batch["y"], 2)
        large = F.interpolate(self.net(small), batch["y"].shape[-2:], mode="bicubic")
        a, b, loss = large.repeat(1, 3, 1, 1), batch["y"].expand(-1, 3, -1, -1), large.sum() * 0
        for layer in self.vgg:
            a, b = layer(a), layer(b)
            if isinstance(layer, nn.ReLU):
                gram = [torch.einsum("bchw,bdhw->bcd", v, v) / v[0].numel() for v in (a, b)]
                loss = loss + F.l1_loss(a, b) + F.mse_loss(*gram)
        errors = (large - batch["y"]).square().mean((1, 2, 3))
        self.report("psnr", (10 * torch.log10(1 / errors)).mean())
        return loss + F.l1_loss(large, batch["y"])


class LayerByLayer(Research):
    """Calls the layers of its blocks one by one, and keeps what they give."""

    def build(self) -> None:
        self.down, self.up = net(1, 96, 96, 96), net(96, 96, 96, 1)

    def loss(self, batch: Any) -> Tensor:
        x, kept = batch["x"], []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x if len(kept) < 2 else x + kept.pop().mean((1, 2, 3), keepdim=True))
        return F.mse_loss(x, batch["y"])


class ClippedByHand(Research):
    """Norms of each layer's gradients are logged, and large ones cut."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = {}
        for name, p in self.named_parameters():
            norm = p.grad.norm()  # pyright: ignore[reportOptionalMemberAccess]
            norms[f"grad/{name}"] = float(norm)
            if norm > 0.05:
                p.grad.mul_(0.05 / norm)  # pyright: ignore[reportOptionalMemberAccess]
        total = nn.utils.clip_grad_norm_(self.parameters(), 0.08)
        norms["grad/total"] = float(total)
        self.log_dict(norms)


class Regularized(Research):
    """Stochastic depth and dropout, with the numbers of one process."""

    is_per_sample = False
    strategy: ClassVar = {"exact_random": True}

    def build(self) -> None:
        self.first, self.last = net(1, 4, 4), nn.Conv2d(4, 1, 1)
        self.blocks = nn.ModuleList([net(4, 4, 4) for _ in range(2)])
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        from torchvision.ops import stochastic_depth

        x = self.first(x)
        for block in self.blocks:
            y = F.dropout(block(x), 0.2, self.training)
            x = x + stochastic_depth(y, 0.4, "row", self.training)
        return self.last(self.drop(x))


class NestedParameters(Research):
    """A network that is an argument, with others, and kept by save_hyperparameters."""

    def __init__(self, body: nn.Module | None = None, loss: Any = None, width: int = 3) -> None:
        body = body or self._body()
        LightningModule.__init__(self)
        self.save_hyperparameters(logger=False)
        self.body, self.criterion = body.double(), loss or nn.SmoothL1Loss(beta=0.5)
        self.net = nn.Sequential(self.body, nn.Conv2d(width, 1, 1, dtype=torch.float64))

    def _body(self) -> nn.Module:
        torch.manual_seed(3)
        return net(1, 4, 3)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch["x"]), batch["y"])


PROGRAMS: dict[str, type[Research]] = {kind.__name__: kind for kind in Research.__subclasses__()}
