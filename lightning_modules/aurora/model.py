"""Aurora as an ordinary LightningModule that is fine-tuned on roll-outs of several steps.

It sees whole fields and only the package's own functions, so a strategy may hand it a batch whose
latitudes, or latitudes and longitudes, are split over ranks.

Shapes: B samples, T states, H latitudes, W longitudes.

Source: Bodnar et al., "A Foundation Model for the Earth System" (https://arxiv.org/abs/2405.13063);
https://github.com/microsoft/aurora.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from lightning_modules.aurora.data import HISTORY
from lightning_modules.shared.optional import optional
from lightning_modules.shared.train_loss import log_train_loss


# Not a lambda: jsonargparse would turn it into init_args, which survive a change of class in YAML.
def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make AdamW with a learning rate of 3e-4."""
    return AdamW(parameters, lr=3e-4)


class AuroraForecast(LightningModule):
    """Fine-tune Aurora on the mean absolute error of all steps of a roll-out.

    A batch is `aurora.Batch` with the two states that Aurora reads and, after them, those that it
    is to forecast; there are as many steps as such states. The error is that of normalised fields:
    the mean over variables, steps and the grid.

    Evaluation logs `val/loss` and `test/loss`, the same of the forecast that nothing changes
    (`test/loss_persistence`), and for each surface variable the error of the last step in its own
    unit, weighed by area: `test/rmse_2t`, beside `test/rmse_2t_persistence`.

    Args:
        network: A class of the package: Aurora, AuroraSmallPretrained and so on.
        options: Its arguments, such as `{"embed_dim": 64}`; smaller networks train anywhere.
        weights: A local file of published weights, such as aurora-0.25-pretrained.ckpt; by default
            they are random.
        adapters_only: True trains only the network's LoRA adapters; it needs
            `options: {"use_lora": true}`.
        weighed: Weights of variables in the loss, by name; 1 by default.
        optimizer: Makes the optimizer of the parameters; AdamW with lr 3e-4 by default. Not stored
            in checkpoints.
        lr_scheduler: Makes the scheduler of the optimizer, stepped once per epoch; none by default.
            Not stored in checkpoints.

    Raises:
        ValueError: The package has no such class, or the class no such argument.
    """

    def __init__(
        self,
        network: str = "AuroraSmallPretrained",
        options: dict[str, Any] | None = None,
        weights: str | None = None,
        adapters_only: bool = False,
        weighed: dict[str, float] | None = None,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", "weights"])
        self.network_class, self.options = _checked(network, options or {})
        self.weights, self.adapters_only = weights, adapters_only
        self.weighed = weighed or {}
        self.make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.network: Any = None

    @override
    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.network = self.network_class(**self.options)
        if self.weights:
            _load(self.network, Path(self.weights))
        if self.adapters_only:
            adapters = [n for n, _ in self.network.named_parameters() if ".lora_" in n]
            if not adapters:
                raise ValueError(
                    "adapters_only needs a network with adapters; set options: {use_lora: true}."
                )
            for name, parameter in self.network.named_parameters():
                parameter.requires_grad_(name in adapters)

    @override
    def forward(self, batch: Any) -> Iterator[Any]:
        """Forecasts of the states after the first two, one after the other."""
        rollout = optional("aurora", "AuroraForecast", "aurora").rollout
        steps = next(iter(batch.surf_vars.values())).shape[1] - HISTORY
        return rollout(self.network, _states(batch, slice(None, HISTORY)), steps)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.crop(self.network.patch_size)
        errors = [
            self._error(forecast, _states(batch, slice(HISTORY + step, HISTORY + step + 1)))
            for step, forecast in enumerate(self(batch))
        ]
        loss = torch.stack(errors).mean()
        log_train_loss(self, loss, len(batch.metadata.time))
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return self._evaluate("val", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return self._evaluate("test", batch)

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Forecasts of all steps: (B, T - 2, H, W), with levels (B, T - 2, C, H, W)."""
        forecasts = list(self(batch.crop(self.network.patch_size)))
        return {
            f"{kind}.{name}": torch.cat([getattr(f, f"{kind}_vars")[name] for f in forecasts], 1)
            for kind in ("surf", "atmos")
            for name in getattr(forecasts[0], f"{kind}_vars")
        }

    @override
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = self.make_optimizer(trained)
        if self.make_lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_lr_scheduler(optimizer)}

    def _error(self, forecast: Any, truth: Any) -> Tensor:
        """The mean absolute error of normalised fields."""
        forecast, truth = (_normalised(x, self.network.surf_stats) for x in (forecast, truth))
        errors = {
            f"{kind}.{name}": (x - getattr(truth, kind)[name]).abs().mean()
            for kind in ("surf_vars", "atmos_vars")
            for name, x in getattr(forecast, kind).items()
        }
        weights = [self.weighed.get(name.split(".")[1], 1.0) for name in errors]
        weighed = [w * error for w, error in zip(weights, errors.values(), strict=True)]
        return torch.stack(weighed).sum() / sum(weights)

    def _evaluate(self, stage: str, batch: Any) -> dict[str, Any]:
        """Log errors of a roll-out; the last forecast, and what it was to be."""
        batch = batch.crop(self.network.patch_size)
        still = _states(batch, slice(HISTORY - 1, HISTORY))
        last, truth, errors = still, still, list[tuple[Tensor, Tensor]]()
        for step, last in enumerate(self(batch)):
            truth = _states(batch, slice(HISTORY + step, HISTORY + step + 1))
            errors.append((self._error(last, truth), self._error(still, truth)))
        loss, persistence = torch.stack([torch.stack(pair) for pair in errors]).mean(0)
        values = {f"{stage}/loss": loss, f"{stage}/loss_persistence": persistence}
        area = batch.metadata.lat.to(self.device).deg2rad().cos()[:, None]
        for name, x in truth.surf_vars.items():
            for suffix, forecast in (("", last), ("_persistence", still)):
                squares = (forecast.surf_vars[name] - x).square() * area / area.mean()
                values[f"{stage}/rmse_{name}{suffix}"] = squares.mean().sqrt()
        self.log_dict(values, on_epoch=True, sync_dist=True, batch_size=len(batch.metadata.time))
        return {"forecast": last, "truth": truth}


def _states(batch: Any, times: slice) -> Any:
    """A batch of some of the states."""
    return dataclasses.replace(
        batch,
        surf_vars={name: x[:, times] for name, x in batch.surf_vars.items()},
        atmos_vars={name: x[:, times] for name, x in batch.atmos_vars.items()},
    )


def _normalised(batch: Any, stats: Any) -> Any:
    return dataclasses.replace(batch, static_vars={}).normalise(stats)


def _checked(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of a network and its arguments.

    Raises:
        ValueError: There is no such class or argument.
    """
    aurora = optional("aurora", "AuroraForecast", "aurora")
    kinds = [key for key in aurora.__all__ if key.startswith("Aurora")]
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1) or kinds
        raise ValueError(f"Aurora has no network {name!r}; use {' or '.join(near)}.")
    kind: Any = getattr(aurora, name)
    known = {key for each in kind.__mro__ for key in inspect.signature(each.__init__).parameters}
    known -= {"self", "args", "kwargs", "kw_args"}
    if unknown := [key for key in options if key not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1) or sorted(known)
        raise ValueError(f"{name} has no option {unknown[0]!r}; use {' or '.join(near)}.")
    return kind, {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}


def _load(network: Any, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"the file of weights {path} does not exist; check its name.")
    network.load_checkpoint_local(str(path))
