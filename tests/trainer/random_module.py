"""The module of a drawn training, its callbacks and its logger."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyExperiment, Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tests.trainer.random_data import Data, GivesLoaders, Pair, fields_of
from tests.trainer.random_network import network_of
from tests.trainer.random_trainings import SEVERAL, Training

Events = list[Any]


class Drawn(LightningModule):
    def __init__(self, drawn: Training, events: Events, data: Data) -> None:
        super().__init__()
        self.drawn, self.events, self.data = drawn, events, data
        self.network = None
        if drawn["made_in"] == "init":
            self._make()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(1, 1, 7, 1, dtype=torch.float64))
        self.error = torchmetrics.MeanSquaredError()
        kinds = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "largest": torchmetrics.MaxMetric()}
        )
        self.kinds = kinds if drawn["log_validation"] == "collection" else None
        self.automatic_optimization = drawn["optimizer"] not in ("manual", "two")
        if drawn["given_by"] == "module":
            self.train_dataloader = data.training
            self.val_dataloader = lambda: GivesLoaders(data).val_dataloader()
            self.test_dataloader = self.predict_dataloader = data.testing

    def _make(self) -> None:
        if self.network is None:
            self.network = network_of(self.drawn)
            if self.drawn["frozen"]:
                self.network[0].requires_grad_(False)

    def configure_model(self) -> None:
        if self.drawn["made_in"] == "configure_model":
            self._make()

    def setup(self, stage: str) -> None:
        if self.drawn["made_in"] == "setup":
            self._make()

    @property
    def backbone(self) -> nn.Module:
        return self.network[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) * self.scale

    def loss_of(self, batch: Any) -> Tensor:
        """Of a batch, or of one of each of several loaders."""
        if self.trainer.training and self.drawn["training_data"] in SEVERAL:
            parts = batch.values() if isinstance(batch, Mapping) else batch
            return sum((self.loss_of_one(part) for part in parts), torch.zeros(()))
        return self.loss_of_one(batch)

    def loss_of_one(self, batch: Any) -> Tensor:
        x, y = fields_of(batch)
        if self.drawn["buffer"] and self.data.replicas == 1:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1, 3), keepdim=True), 0.1)
            x = x - self.mean
        return (self(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        loss = self.loss_of(batch) if self.automatic_optimization else self._own_steps(batch)
        self._log_training(loss)
        match self.drawn["step_returns"]:
            case "dict":
                return {"loss": loss}
            case "more":
                return {"loss": loss, "twice": 2 * loss.detach()}
        return loss

    def _own_steps(self, batch: Any) -> Tensor:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        loss = torch.zeros(())
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if self.drawn["toggles"]:
                self.toggle_optimizer(optimizer)
            self.zero_grad()
            loss = self.loss_of(batch)
            self.manual_backward(loss)
            if self.drawn["clip"] is not None:
                self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            if self.drawn["toggles"]:
                self.untoggle_optimizer(optimizer)
        if self.drawn["schedule"] != "plateau" and schedulers is not None:
            schedulers.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        return loss

    def _log_training(self, loss: Tensor) -> None:
        at, loss = self.drawn["log_training"], loss.detach()
        options: dict[str, Any] = {"sync_dist": True, "batch_size": self.data.size}
        match at:
            case "step" | "epoch" | "both":
                self.log("loss", loss, on_step=at != "epoch", on_epoch=at != "step", **options)
            case "sum" | "max":
                self.log("loss", loss, on_epoch=True, on_step=False, reduce_fx=at, **options)

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = fields_of(batch)
        guess = self(x)
        loss = (guess - y).square().mean()
        options: dict[str, Any] = {"sync_dist": True, "batch_size": len(x)}
        match self.drawn["log_validation"]:
            case "mean":
                self.log(f"{stage}_loss", loss, **options)
            case "min":
                self.log(f"{stage}_loss", loss, reduce_fx="min", **options)
            case "dict":
                self.log_dict({f"{stage}_loss": loss, f"{stage}_mean": guess.mean()}, **options)
            case "metric":
                self.error(guess, y)
                self.log(f"{stage}_loss", self.error)
            case "collection":
                assert self.kinds is not None
                self.kinds["mae"].update(guess, y)
                self.kinds["largest"].update(guess.max())
                self.log_dict({f"{stage}_{k}": v for k, v in self.kinds.items()})
        if stage == "val" and self.drawn["log_validation"] != "none":
            self.log("monitored", loss, **options, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(fields_of(batch)[0])

    def _hook(self, name: str) -> None:
        if self.drawn["log_hook"] == name and not self.trainer.sanity_checking:
            bar, logger = self.drawn["shown"]
            value = self.scale.detach().clone() + self.trainer.global_step
            if isinstance(value, DTensor):
                value = value.full_tensor()
            self.log(f"in_{name}", value, prog_bar=bar, logger=logger, batch_size=1)

    def _flipped(self, batch: Any, name: str) -> Any:
        """The batch, with its fields in another order of columns where `name` is drawn."""
        if self.drawn["transfer"] != name:
            return batch
        if isinstance(batch, Pair):
            return Pair(batch.x.flip(-1), batch.y.flip(-1))
        return tree_map_only(Tensor, lambda x: x.flip(-1), batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._flipped(batch, "before")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._flipped(batch, "after")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        batch = self._flipped(batch, "device")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        if self.drawn["own_backward"]:
            (2 * loss).backward(*args, **options)
        else:
            super().backward(loss, *args, **options)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.drawn["zeroes"]:
            optimizer.zero_grad(set_to_none=False)
        else:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["own"] == checkpoint["global_step"]

    def on_train_epoch_end(self) -> None:
        self._hook("on_train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        if self.drawn["gathers"]:
            number = self.scale.detach().clone() * self.trainer.global_step
            if isinstance(number, DTensor):
                number = number.full_tensor()
            self.events.append(("gathered", float(self.all_gather(number).mean())))
        self._hook("on_validation_epoch_end")

    def on_train_epoch_start(self) -> None:
        self._hook("on_train_epoch_start")

    def on_train_start(self) -> None:
        self._hook("on_train_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._hook("on_before_zero_grad")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._hook("on_validation_batch_end")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self._hook("on_train_batch_start")
        return -1 if self.drawn["skips_rest"] and batch_idx == 2 else None

    def configure_callbacks(self) -> Any:
        return [Timer(interval="step")] if self.drawn["configures_callbacks"] else []

    def on_after_backward(self) -> None:
        if self.drawn["after_backward"]:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.events.append(("gradients", [float(n) for n in norms]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.drawn["before_step"]:
            self.log("scale", self.scale.detach().clone(), on_step=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        if self.drawn["clip"] == "own":
            self.clip_gradients(optimizer, 0.1 / (1 + self.global_step), "norm")
        else:
            super().configure_gradient_clipping(optimizer, *args, **options)

    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any = None) -> None:
        if self.drawn["own_optimizer_step"]:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, (self.global_step + 1) / 3)
        super().optimizer_step(epoch, batch, optimizer, closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.drawn["schedule"] == "own":
            scheduler.step()
            self.events.append(("rate", scheduler.get_last_lr()))
        else:
            super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        kind = self.drawn["optimizer"]
        trained = [p for p in self.parameters() if p.requires_grad]
        match kind:
            case "adam" | "adamw":
                made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](trained, 0.01)
            case "lbfgs":
                made = torch.optim.LBFGS(trained, 0.05, max_iter=3)
            case "groups":
                made = torch.optim.SGD(
                    [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}], 0.02, 0.9
                )
            case "two":
                first, second = trained[:2], trained[2:]
                return [torch.optim.SGD(first, 0.05, 0.5), torch.optim.Adam(second, 0.01)]
            case _:
                made = torch.optim.SGD(trained, 0.05, momentum=0.9)
        return self._with_schedule(made)

    def _with_schedule(self, optimizer: Any) -> Any:
        rates = torch.optim.lr_scheduler
        match self.drawn["schedule"]:
            case "epoch" | "own":
                return [optimizer], [rates.ExponentialLR(optimizer, 0.7)]
            case "step":
                plan = {"scheduler": rates.StepLR(optimizer, 2, 0.5), "interval": "step"}
                return {"optimizer": optimizer, "lr_scheduler": plan}
            case "cycle" if self.drawn["optimizer"] != "lbfgs":
                made = rates.OneCycleLR(optimizer, 0.1, total_steps=60)
                plan = {"scheduler": made, "interval": "step", "frequency": 2}
                return {"optimizer": optimizer, "lr_scheduler": plan}
            case "plateau":
                made = rates.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
                plan = {"scheduler": made, "monitor": "monitored", "strict": False}
                return {"optimizer": optimizer, "lr_scheduler": plan}
        return optimizer


class Thaws(BackboneFinetuning):
    """Takes the first layer for the backbone."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.network[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.network[0], optimizer, 0.01)


def callbacks_of(
    drawn: Training, events: Events, folder: str, mean: Callable[[Tensor], Tensor]
) -> list[Any]:
    made: list[Callback] = [Watches(drawn, events, mean)]
    if drawn["scheduled"]:
        made.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    match drawn["averaging"]:
        case "ema":
            made.append(EMAWeightAveraging(decay=0.8))
        case "each step":
            made.append(WeightAveraging(device=None))
        case "swa":
            made.append(StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1))
    if drawn["finetuning"]:
        made.append(Thaws(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 2.0, verbose=False))
    if drawn["stopping"]:
        made.append(EarlyStopping("monitored", min_delta=0.5, patience=1, strict=False))
    options: dict[str, Any] = {"dirpath": folder, "filename": "{epoch}-{step}"}
    options["save_weights_only"] = drawn["saves_weights"]
    match drawn["checkpoint"]:
        case "best":
            made.append(ModelCheckpoint(**options, monitor="monitored", save_top_k=2))
        case "steps":
            made.append(ModelCheckpoint(**options, every_n_train_steps=2, save_top_k=-1))
        case "epoch":
            made.append(ModelCheckpoint(**options, save_last=True, save_on_train_epoch_end=True))
    if drawn["rates"]:
        made.append(LearningRateMonitor())
    return made


class Notes(Logger):
    """A logger that keeps what it is given."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> Any:
        return DummyExperiment()

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing of it is compared."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.events.append(("logged", step, dict(metrics)))


class Saves(Callback):
    """Saves after some batches, and notes where; comes after all other callbacks."""

    def __init__(self, after: int, path: str, events: Events) -> None:
        self.left, self.path, self.events = after, path, events

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            self.events.append("saved")


class Watches(Callback):
    """Notes losses and hooks, and logs values of its own."""

    def __init__(self, drawn: Training, events: Events, mean: Callable[[Tensor], Tensor]) -> None:
        self.drawn, self.events, self.mean = drawn, events, mean

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self.events.append(("loss", trainer.global_step, self.mean(loss)))
        if self.drawn["log_in_callback"]:
            module.log("from_callback", self.mean(loss), on_step=True, on_epoch=True)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.events.append(("validated", trainer.global_step, dict(trainer.callback_metrics)))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch", trainer.current_epoch, trainer.global_step))
