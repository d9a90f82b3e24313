"""Random trainings see, log, save and predict on ranks and in tiles what they do in one process.

Each test of a seed draws a training (random_trainings.py). It runs under Lightning's own strategy
for one process, and on all ranks or in tiles; what both have noted is compared. Where it fails, the
choices without which it still fails are left out one by one, and the message names the rest.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_shard import TiledStrategy, predictions_in_order
from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.trainer.featured import QUIET
from tests.trainer.random_data import Data, GivesLoaders
from tests.trainer.random_module import Drawn, Events, Notes, Saves, callbacks_of
from tests.trainer.random_trainings import CHOICES, Training, draw
from tests.training import shared_path

OWN_STEPS = ("manual", "two")


def options_of(drawn: Training) -> dict[str, Any]:
    """Arguments of the Trainer."""
    kind, length = drawn["length"]
    options: dict[str, Any] = {
        "max_epochs": length if kind == "epochs" else 10,
        "max_steps": length if kind == "steps" else -1,
        "num_sanity_val_steps": drawn["sanity"],
        "val_check_interval": drawn["validate_every"] if drawn["validate_epochs"] else 3,
        "check_val_every_n_epoch": drawn["validate_epochs"],
        "limit_train_batches": drawn["limit_training"],
        "limit_val_batches": drawn["limit_validation"],
        "overfit_batches": drawn["overfit"],
        "reload_dataloaders_every_n_epochs": drawn["reload"],
        "log_every_n_steps": drawn["logger_every"],
        "enable_checkpointing": drawn["checkpoint"] != "none",
        "accumulate_grad_batches": drawn["accumulate"],
        "inference_mode": drawn["inference_mode"],
        "detect_anomaly": drawn["detect_anomaly"],
        "min_epochs": drawn["min_epochs"],
        "precision": drawn["precision"],
        "fast_dev_run": drawn["fast_dev_run"],
    }
    if isinstance(drawn["clip"], tuple) and drawn["optimizer"] not in OWN_STEPS:
        how, size = drawn["clip"]
        options |= {"gradient_clip_val": size, "gradient_clip_algorithm": how}
    return options


class Run:
    """A drawn training: in one process (`domain` is None), in tiles (`()`), or on all ranks.

    In one process it is not resumed; what happens after it was saved is what is compared.
    """

    def __init__(self, drawn: Training, domain: tuple[int, ...] | None, folder: Path) -> None:
        self.drawn, self.domain, self.folder = drawn, domain, folder
        self.events: Events = []
        self.replicas, self.replica = 1, 0
        if domain:
            ranks = torch.Size(domain).numel()
            self.replicas, self.replica = dist.get_world_size() // ranks, dist.get_rank() // ranks
        self._begin()

    def _begin(self) -> None:
        self.data = Data(self.drawn, self.replicas, self.replica)
        self.module = Drawn(self.drawn, self.events, self.data)

    def run(self) -> dict[str, Any]:
        """Train, and do what follows; return all that is compared."""
        seed_everything(1, verbose=False)
        runner = self._trainer(saves=True)
        self._fit(runner)
        if "saved" in self.events:
            runner = self._go_on(runner)
        self._follow(runner)
        kept = [c for c in runner.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        return {
            "events": self.events,
            "state": full_module_state(self.module) if self.domain else self.module.state_dict(),
            "metrics": dict(runner.callback_metrics),
            "steps": runner.global_step,
            # a checkpoint lacks what callbacks do in its hook after it was saved
            "best": [] if self.drawn["resume"] else [_best(callback) for callback in kept],
        }

    def _trainer(self, *, saves: bool) -> Trainer:
        callbacks = callbacks_of(self.drawn, self.events, str(self.folder), self._mean)
        if saves and self.drawn["resume"]:
            path = str(self.folder / "resumed.ckpt")
            callbacks.append(Saves(self.drawn["resume"], path, self.events))
        options = options_of(self.drawn) | {"callbacks": callbacks, "logger": Notes(self.events)}
        if not self.domain:
            strategy = "auto" if self.domain is None else TiledStrategy(self.drawn["tiles"])
            plain = {"devices": 1, "plugins": LightningEnvironment(), "strategy": strategy}
            return Trainer(**(QUIET | options | plain))
        strategy = {"sharding": self.drawn["sharding"], "exact_random": True}
        return training.trainer(self.domain, strategy=strategy, **options)

    def _mean(self, value: Tensor) -> Tensor:
        """Over the data replicas."""
        value = value.detach().clone()
        if self.domain:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    def _fit(self, runner: Trainer, **options: Any) -> None:
        match self.drawn["given_by"]:
            case "loaders":
                loaders = self.data.training(), self.data.validation()
                runner.fit(self.module, *loaders, **options)
            case "datamodule":
                runner.fit(self.module, datamodule=GivesLoaders(self.data), **options)
            case _:
                runner.fit(self.module, **options)

    def _go_on(self, runner: Trainer) -> Trainer:
        """Train again from the checkpoint; in one process leave the events that come after it."""
        if self.domain is None:
            del self.events[: self.events.index("saved") + 1]
            if self.events and _is_of_a_step(self.events[0]):  # it is logged once the step ends
                del self.events[0]
            return runner
        path = self.folder / "resumed.ckpt"
        self.events.clear()
        self.folder = self.folder / "again"
        self._begin()
        seed_everything(2, verbose=False)
        runner = self._trainer(saves=False)
        self._fit(runner, ckpt_path=path)
        return runner

    def _follow(self, runner: Trainer) -> None:
        for stage in self.drawn["stages"]:
            match stage:
                case "fit":
                    runner.fit_loop.max_epochs = (runner.fit_loop.max_epochs or 0) + 1
                    self._fit(runner)
                case "validate":
                    loader = self.data.loader("plain", 8, 200)
                    self.events.append(runner.validate(self.module, loader, verbose=False))
                case "test":
                    best = self.drawn["tests_best"] and self.drawn["checkpoint"] == "best"
                    path = "best" if best else None
                    loaders = self.data.testing()
                    found = runner.test(self.module, loaders, ckpt_path=path, verbose=False)
                    self.events.append(found)
                case _:
                    self.events.append(self._predicted(runner))

    def _predicted(self, runner: Trainer) -> list[Tensor]:
        found: Any = runner.predict(
            self.module, self.data.loader("plain", self.drawn["test_samples"], 400)
        )
        if self.domain is not None:
            return list(predictions_in_order(runner, found))
        return [row for batch in found for row in batch]


def _best(callback: ModelCheckpoint) -> tuple[str, Any]:
    return Path(callback.best_model_path).name, callback.best_model_score


def _is_of_a_step(event: Any) -> bool:
    """Say whether a logger was given what a training step had logged."""
    names = event[2] if event[0] == "logged" else {}
    ends = any(name.startswith(("val", "monitored", "lr")) or "epoch_" in name for name in names)
    return bool(names) and not ends and not any(name.endswith("_epoch") for name in names)


def differences(found: Any, wanted: Any, at: str = "", coarse: float = 0.0) -> list[str]:
    """Where two runs differ by more than `coarse`. Lightning logs in float32."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping) and found.keys() == wanted.keys():
        both = ((f"{at}.{key}", found[key], wanted[key]) for key in wanted)
        return [d for name, f, w in both for d in differences(f, w, name, coarse)]
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        both = enumerate(zip(found, wanted, strict=False))
        inner = [d for i, (f, w) in both for d in differences(f, w, f"{at}.{i}", coarse)]
        return inner if inner or len(found) == len(wanted) else [_unlike(at, found, wanted)]
    if isinstance(wanted, Tensor | float) and isinstance(found, Tensor | float | int):
        mine, plain = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
        exact = isinstance(wanted, Tensor) and wanted.dtype == torch.float64
        relative = max(1e-7 if exact else 2e-6, coarse)  # LBFGS makes much of rounding
        alike = mine.shape == plain.shape
        if alike and torch.allclose(mine, plain, relative, max(1e-9, coarse), equal_nan=True):
            return []
        return [_unlike(at, mine, plain)]
    return [] if type(found) is type(wanted) and found == wanted else [_unlike(at, found, wanted)]


def _unlike(at: str, found: Any, wanted: Any) -> str:
    mine, plain = (str(value).replace("\n", " ")[:160] for value in (found, wanted))
    return f"{at}: {mine} for {plain}"


def compare(drawn: Training, domain: tuple[int, ...], folder: Path) -> list[str]:
    """Train in both ways, and say how they differ."""
    alone = folder / f"alone_{dist.get_rank() if domain else 0}"
    wanted = Run(drawn, None, alone).run()
    try:
        found = Run(drawn, domain, folder).run()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return differences(found, wanted)[:3]


def on_all_ranks(drawn: Training, domain: tuple[int, ...]) -> list[str]:
    """Say on all ranks alike what the first one says for which they differ."""
    each: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, compare(drawn, domain, shared_path("runs")))
    return next((said for said in each if said), [])


def check(seed: int, replicas: int, compared: Callable[[Training], list[str]]) -> None:
    warnings.simplefilter("ignore")  # Lightning's advice on loaders and checkpoints
    drawn = draw(seed, replicas)
    said = compared(drawn)
    if not said:
        return
    for name, (usual, *_) in CHOICES.items():
        simpler = drawn | {name: usual}
        with suppress(Exception):  # Lightning itself refuses some
            if simpler != drawn and (still := compared(simpler)):
                drawn, said = simpler, still
    least = {name: value for name, value in drawn.items() if value != CHOICES[name][0]}
    raise AssertionError(f"seed {seed}, {least}: {said}")


def check_on_ranks(seed: int, domain: tuple[int, ...]) -> None:
    replicas = dist.get_world_size() // torch.Size(domain).numel()
    # ranks of the pool start no processes
    check(seed, replicas, lambda drawn: on_all_ranks(drawn | {"workers": 0}, domain))


MESHES = {
    "1x2": (2, (2,)),
    "2x1": (2, (1,)),
    "2x2": (4, (2,)),
    "1x3": (3, (3,)),
    "1x2x2": (4, (2, 2)),
}


def slow(seeds: range) -> list[Any]:
    return [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


def programs(domain: tuple[int, ...], seeds: range) -> dict[str, dict[str, Any]]:
    return {str(seed): {"seed": seed, "domain": domain} for seed in seeds}


@pytest.mark.quick_rows("1x2")
@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_random_trainings(mesh, run_each):
    ranks, domain = MESHES[mesh]
    run_each(ranks, check_on_ranks, programs(domain, range(1)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(i, i + 21) for i in range(1, 102, 21)], ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_many_random_trainings(mesh, seeds, run_each):
    ranks, domain = MESHES[mesh]
    run_each(ranks, check_on_ranks, programs(domain, seeds))


@pytest.mark.parametrize("seed", [0, *slow(range(1, 102))])
def test_random_trainings_in_tiles(seed, tmp_path):
    folders = (tmp_path / str(number) for number in count())
    check(seed, 1, lambda drawn: compare(drawn, (), next(folders)))
