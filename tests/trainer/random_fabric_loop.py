"""Loops of Fabric that are drawn from a seed, in one process or on ranks."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_shard
from lightning_shard.checkpoint.state import full_module_state
from tests.trainer.random_data import Data, fields_of
from tests.trainer.random_fabric import Hears, Network, Program, whole
from tests.trainer.random_module import Notes


class Loop:
    """A loop of Fabric that notes what it sees.

    Args:
        program: The program.
        make: Makes Fabric, with a callback and a logger.
        replicas: Number of data replicas.
        replica: Which of them this is.
        folder: For checkpoints.
    """

    def __init__(
        self,
        program: Program,
        make: Callable[..., Fabric],
        replicas: int,
        replica: int,
        folder: Path,
    ) -> None:
        self.program, self.events, self.folder = program, [], folder
        self.data = Data(program, replicas, replica)
        self.fabric = make(callbacks=[Hears(self.events)], loggers=[Notes(self.events)])
        self.replicas = replicas
        self._begin()

    def _begin(self) -> None:
        program, fabric = self.program, self.fabric
        fabric.seed_everything(3, verbose=False)
        with fabric.init_module() if program["init_module"] else nullcontext():
            net = Network(program)
            critic = nn.Conv2d(1, 1, 3, padding=1)
        if program["precision"] in ("64", "64-true"):
            net, critic = net.double(), critic.double()
        else:
            net, critic = net.float(), critic.float()
        if program["frozen"] != "none":
            net.body[0].requires_grad_(False)
        self._set_up(net, critic)
        self.net.train()

    def _set_up(self, net: nn.Module, critic: nn.Module) -> None:
        program, fabric = self.program, self.fabric
        how = program["setup"]
        if how in ("after", "apart"):
            made = self._optimizers(net) if how == "apart" else []
            self.net = fabric.setup_module(net)
            made = made or self._optimizers(self.net)
            self.schedulers = self._schedulers(made)
            found = fabric.setup_optimizers(*made)
            self.optimizers = list(found) if isinstance(found, tuple) else [found]
        else:
            made = self._optimizers(net)
            self.schedulers = self._schedulers(made)
            options = {}
            if how == "scheduler" and self.schedulers:
                options["scheduler"] = self.schedulers[0]
            self.net, *self.optimizers = fabric.setup(net, *made, **options)
            if options:
                self.schedulers[0] = self.optimizers.pop()
        if program["called_by"] == "marked":
            self.net.mark_forward_method("encode")
            self.net.mark_forward_method("decode")
        self.critic = self.critic_optimizer = None
        if program["optimizer"] == "gan":
            made = torch.optim.Adam(critic.parameters(), 0.01)
            self.critic, self.critic_optimizer = fabric.setup(critic, made)

    def _optimizers(self, net: nn.Module) -> list[Any]:
        trained = [p for p in net.parameters() if p.requires_grad]
        match self.program["optimizer"]:
            case "adam" | "gan":
                return [torch.optim.Adam(trained, 0.01)]
            case "adamw":
                return [torch.optim.AdamW(trained, 0.01)]
            case "foreach":
                return [torch.optim.AdamW(trained, 0.01, foreach=True)]
            case "fused":
                return [torch.optim.Adam(trained, 0.01, fused=True)]
            case "lbfgs":
                return [torch.optim.LBFGS(trained, 0.05, max_iter=3, line_search_fn="strong_wolfe")]
            case "two":
                first, second = trained[:2], trained[2:]
                return [torch.optim.SGD(first, 0.05, 0.5), torch.optim.Adam(second, 0.01)]
            case "groups":
                groups = [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}]
                return [torch.optim.SGD(groups, 0.02, 0.9)]
        return [torch.optim.SGD(trained, 0.05, momentum=0.9)]

    def _schedulers(self, optimizers: list[Any]) -> list[Any]:
        rates = torch.optim.lr_scheduler
        match self.program["schedule"]:
            case "epoch":
                return [rates.ExponentialLR(o, 0.7) for o in optimizers]
            case "step":
                return [rates.StepLR(o, 2, 0.5) for o in optimizers]
            case "plateau":
                return [rates.ReduceLROnPlateau(o, patience=0, threshold=0.3) for o in optimizers]
        return []

    def _loaders(self) -> list[Any]:
        kind, count = self.program["training_data"], self.program["samples"]
        if kind == "two":
            made = [self.data.loader("shuffle", count), self.data.loader("plain", count, 100)]
        else:
            made = [self.data.loader("shuffle" if kind in ("epochs", "first") else kind, count)]
        found = self.fabric.setup_dataloaders(*made)
        return found if isinstance(found, list) else [found]

    # The loop.

    def run(self, stop: int | None = None) -> None:
        self.loaders = self._loaders()
        self.validation = self.fabric.setup_dataloaders(self.data.loader("plain", 8, 200))
        torch.manual_seed(11)
        self.step = 0
        for epoch in range(self.program["epochs"]):
            if epoch == 1 and self.program["frozen"] == "thaws":
                self._thaw()
            self._train(epoch)
            value = self._evaluate() if self.program["evaluates"] == "epoch" else None
            self._schedule("epoch", value)
            self.fabric.call("on_epoch", number=epoch)
            self.fabric.log_dict({"epoch": epoch, "value": value or 0.0}, step=epoch)

    def _thaw(self) -> None:
        first = self.net.body[0]
        first.requires_grad_(True)
        self.optimizers[0].add_param_group({"params": list(first.parameters()), "lr": 0.03})

    def _batches(self) -> Iterator[list[Any]]:
        if self.program["training_data"] == "first":
            yield [next(iter(self.loaders[0]))]
            return
        for batches in zip(*self.loaders, strict=False):
            yield list(batches)

    def _train(self, epoch: int) -> None:
        program = self.program
        every = program["accumulate"]
        for number, batches in enumerate(self._batches(), 1):
            last = number % every == 0
            if program["optimizer"] == "lbfgs":
                self._step_lbfgs(batches)
            elif program["optimizer"] == "gan":
                self._step_gan(batches, last)
            else:
                self._accumulate(batches, last)
                if last:
                    self._step()
            if last:
                self.step += 1
                self._schedule("step", None)
            if program["evaluates"] == "steps" and number % 2 == 0:
                self._evaluate()
        for optimizer in self.optimizers:
            self._zero(optimizer)

    def _accumulate(self, batches: list[Any], last: bool) -> None:
        program, fabric = self.program, self.fabric
        how = program["no_sync"]
        with fabric.no_backward_sync(self.net, enabled=how == "both" and not last):
            loss = self._loss(batches) / program["accumulate"]
            with fabric.no_backward_sync(self.net, enabled=how == "backward" and not last):
                self._backward(loss, batches)
        self._note(loss)

    def _backward(self, loss: Tensor, batches: list[Any]) -> None:
        if self.program["passes"] == "two losses":
            self.fabric.backward(loss, retain_graph=True)
            self.fabric.backward(loss * 0.5)
        elif self.program["passes"] == "autograd":
            trained = [p for p in self.net.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            norms = [float(self._mean(g).norm()) for g in found if g is not None]
            self.events.append(("found", norms))
            self.fabric.backward(loss, model=self.net)
        else:
            self.fabric.backward(loss)

    def _loss(self, batches: list[Any]) -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            x, y = self._fields(batch)
            if self.program["passes"] == "penalty":
                x = x.detach().requires_grad_()
            guess = self._call(x)
            loss = loss + (guess - y).square().mean()
            if self.program["passes"] == "two forwards":
                loss = loss + self._call(-x).square().mean()
            if self.program["passes"] == "penalty":
                (slope,) = torch.autograd.grad(guess.sum(), x, create_graph=True)
                loss = loss + slope.square().mean()
        if self.program["passes"] == "decay":
            loss = loss + 0.01 * sum(p.square().sum() for p in self.net.parameters())
        return loss

    def _fields(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = fields_of(batch)
        if self.program["precision"] not in ("64", "64-true"):
            return x.float(), y.float()
        return x, y

    def _call(self, x: Tensor) -> Tensor:
        match self.program["called_by"]:
            case "marked":
                return self.net.decode(self.net.encode(x))
            case "part":
                return self.net(x) + 0.1 * self.net.head(self.net.body(x))
        return self.net(x)

    def _step(self) -> None:
        clip = self.program["clip"]
        for optimizer in self.optimizers:
            if self.program["notes"] == "gradients":
                grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
                norms = [None if g is None else whole(g).norm().item() for g in grads]
                self.events.append(("gradients", norms))
            match clip:
                case ("norm", size):
                    found = self.fabric.clip_gradients(self.net, optimizer, max_norm=size)
                    self.events.append(("norm", found))
                case ("inf", size):
                    norm: Any = {"max_norm": size, "norm_type": "inf"}
                    found = self.fabric.clip_gradients(self.net, optimizer, **norm)
                    self.events.append(("norm", found))
                case ("value", size):
                    self.fabric.clip_gradients(self.net, optimizer, clip_val=size)
            optimizer.step()
        for optimizer in self.optimizers:
            self._zero(optimizer)

    def _zero(self, optimizer: Any) -> None:
        match self.program["zero_grad"]:
            case "module":
                self.net.zero_grad()
            case "zeros":
                optimizer.zero_grad(set_to_none=False)
            case _:
                optimizer.zero_grad()

    def _step_lbfgs(self, batches: list[Any]) -> None:
        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            loss = self._loss(batches)
            self.fabric.backward(loss)
            return loss

        self._note(self.optimizers[0].step(closure))

    def _step_gan(self, batches: list[Any], last: bool) -> None:
        assert self.critic is not None
        assert self.critic_optimizer is not None
        x, y = self._fields(batches[0])
        made = self._call(x)
        loss = self.critic(made.detach()).square().mean() - self.critic(y).square().mean()
        self.critic_optimizer.zero_grad()
        self.fabric.backward(loss)
        self.critic_optimizer.step()
        self._note(loss)
        loss = self.critic(made).square().mean() + (made - y).square().mean()
        self.fabric.backward(loss / self.program["accumulate"])
        self._note(loss)
        if last:
            self._step()

    def _schedule(self, when: str, value: Any) -> None:
        kind = self.program["schedule"]
        for scheduler in self.schedulers:
            if kind == when:
                scheduler.step()
            elif kind == "plateau" and value is not None:
                scheduler.step(value)
        if self.schedulers:
            self.events.append(("rates", [g["lr"] for g in self.optimizers[0].param_groups]))

    # What is noted.

    def _mean(self, value: Tensor) -> Tensor:
        found = self.fabric.all_reduce(value.detach().clone())
        assert isinstance(found, Tensor)
        return found

    def _note(self, loss: Tensor) -> None:
        value = loss.detach().clone()
        match self.program["notes"]:
            case "in place":
                self.fabric.all_reduce(value)
                self.events.append(("loss", value))
            case "gathered":
                found: Any = self.fabric.all_gather({"a": value})
                self.events.append(("loss", torch.as_tensor(found["a"]).mean()))
            case "sum":
                found = self.fabric.all_reduce(value, reduce_op="sum")
                self.events.append(("loss", found / self.replicas))
            case _:
                self.events.append(("loss", self._mean(value)))
                self.fabric.log("loss", self._mean(value), step=self.step)

    def _evaluate(self) -> float:
        self.net.eval()
        error = torchmetrics.MeanSquaredError()
        losses = []
        with torch.no_grad():
            for batch in self.validation:
                x, y = self._fields(batch)
                guess = self.net(x)
                losses.append((guess - y).square().mean())
                error.update(guess, y.to(guess.dtype))
                self.events.append(("predicted", self._in_order(guess)))
        self.net.train()
        value = self._mean(torch.stack(losses).mean())
        self.events.append(("validated", error.compute(), value))
        return float(value)

    def _in_order(self, guess: Tensor) -> Tensor:
        if self.data.replicas == 1 and not isinstance(guess, lightning_shard.DomainTensor):
            return guess.clone()
        found: Any = self.fabric.all_gather(lightning_shard.gather(guess))
        if self.data.replicas == 1:
            return found
        return found.transpose(0, 1).flatten(0, 1)

    def state(self) -> dict[str, Any]:
        states = {"net": full_module_state(self.net.module)}
        if self.critic is not None:
            states["critic"] = full_module_state(self.critic.module)
        return states

    # Checkpoints.

    def _objects(self) -> dict[str, Any]:
        found: dict[str, Any] = {"net": self.net}
        found |= {f"optimizer_{i}": o for i, o in enumerate(self.optimizers)}
        found |= {f"schedule_{i}": s for i, s in enumerate(self.schedulers)}
        if self.critic is not None:
            found |= {"critic": self.critic, "critic_optimizer": self.critic_optimizer}
        return found

    def save(self, kind: str) -> None:
        path = self.folder
        match kind:
            case "states":
                states = {name: held.state_dict() for name, held in self._objects().items()}
                self.fabric.save(path / "all.ckpt", states)
            case "filter":
                keep = {"net": lambda name, value: "head" not in name and value is not None}
                self.fabric.save(path / "all.ckpt", self._objects(), filter=keep)
            case "raw":
                for name, held in self._objects().items():
                    self.fabric.save(path / f"{name}.ckpt", {"it": held})
            case _:
                self.fabric.save(path / "all.ckpt", self._objects() | {"steps": self.step})

    def load(self, kind: str) -> None:
        path, held = self.folder, self._objects()
        match kind:
            case "all":
                state = held | {"steps": 0}
                rest = self.fabric.load(path / "all.ckpt", state)
                self.events.append(("loaded", rest, state["steps"]))
            case "filter":
                loaded = self.fabric.load(path / "all.ckpt")
                self.net.load_state_dict(loaded.pop("net"), strict=False)
                for name, value in loaded.items():
                    held[name].load_state_dict(value)
            case "states":
                loaded = self.fabric.load(path / "all.ckpt")
                for name, value in loaded.items():
                    held[name].load_state_dict(value)
            case _:
                for name, each in held.items():
                    state = torch.load(path / f"{name}.ckpt", weights_only=False)["it"]
                    if self.fabric.is_global_zero:
                        torch.save(state, path / f"{name}.raw")
                    self.fabric.barrier()
                    if isinstance(each, nn.Module | torch.optim.Optimizer):
                        self.fabric.load_raw(path / f"{name}.raw", each)
                    else:
                        each.load_state_dict(state)
