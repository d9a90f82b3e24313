"""Objects that user code holds in tiles: closures over a module, its parts, what a run leaves."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard import TiledStrategy, allow_gather
from tests.lab.test_tiled_training import QUIET, alone, loader
from tests.parity import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders and loaders
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Small(LightningModule):
    """Two convolutions and batch norm, which note their losses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(),
            nn.Conv2d(4, 3, 3, padding=1),
        ).to(dtype)  # fmt: skip
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.flip(-1)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch.to(next(self.parameters()).dtype))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class HookOverSelf(Small):
    def __init__(self) -> None:
        super().__init__()
        self.extra: list[Tensor] = []
        self.net[0].register_forward_hook(
            lambda module, args, out: self.extra.append(out.square().mean())
        )

    def loss(self, x: Tensor) -> Tensor:
        self.extra.clear()
        loss = super().loss(x) + sum(self.extra)
        self.extra.clear()
        return loss


class ActivationOverParameter(Small):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.acts = {"scaled": lambda x: x * self.alpha}

    def forward(self, x: Tensor) -> Tensor:
        return self.acts["scaled"](super().forward(x))


class ScheduleOverSelf(Small):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        weighted = lambda loss, own=self: own.weight * loss  # noqa: E731 - as users write it
        self.weighted = partial(weighted)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight += 1

    def loss(self, x: Tensor) -> Tensor:
        return self.weighted(super().loss(x))


class Compiled(Small):
    def __init__(self) -> None:
        super().__init__()
        compiled: Any = torch.compile(self.net[3], backend="eager")
        self.net[3] = compiled


def fit(
    make: Callable[[], Small], tiles: int | None, max_epochs: int = 2, precision: Any = None
) -> Small:
    module = make()
    strategy = "auto" if tiles is None else TiledStrategy(tiles)
    with alone():
        runner = Trainer(
            accelerator="cpu", strategy=strategy, max_epochs=max_epochs, precision=precision,
            **QUIET,
        )  # fmt: skip
        runner.fit(module, loader())
    return module


def assert_same_module(found: Small, wanted: Small) -> None:
    assert_same(torch.tensor(found.losses), torch.tensor(wanted.losses))
    states = found.state_dict(), wanted.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert states[0][name].dtype == value.dtype
        assert_same(states[0][name].double(), value.double(), name)


@pytest.mark.parametrize(
    "make", [HookOverSelf, ActivationOverParameter, ScheduleOverSelf, Compiled]
)
def test_functions_over_a_module_and_compiled_parts_are_those_of_each_tile(make: Any) -> None:
    assert_same_module(fit(make, 2), fit(make, None))


class Decay(Callback):
    def __init__(self, part: Any) -> None:
        self.part = part

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            self.part.weight.mul_(0.9)


class Called(Callback):
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.call()


@pytest.mark.parametrize(
    "made",
    [
        lambda module: Decay(module.net[3]),
        lambda module: Called(lambda: module.losses),
        lambda module: Called(module.net[3].extra_repr),
    ],
    ids=["part", "closure", "method"],
)
def test_a_callback_that_holds_a_part_of_the_module_is_refused(made: Any) -> None:
    module = Small()
    runner = Trainer(
        accelerator="cpu", max_steps=1, strategy=TiledStrategy(2), callbacks=[made(module)], **QUIET
    )
    with pytest.raises(ValueError, match=r"holds a part of the module.*pl_module"):
        runner.fit(module, loader())


class MadeInSetup(Small):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.is_trained = trained

    def setup(self, stage: str) -> None:
        self.head = nn.Conv2d(3, 3, 1).double().requires_grad_(self.is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_made_in_setup_is_refused_before_the_first_step(trained: bool) -> None:
    module = MadeInSetup(trained=trained)
    runner = Trainer(accelerator="cpu", max_steps=1, strategy=TiledStrategy(2), **QUIET)
    with pytest.raises(ValueError, match=r"'head\.bias'.*configure_model"):
        runner.fit(module, loader())
    assert not module.losses


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_true_precision_leaves_the_weights_in_it(precision: Any) -> None:
    make = partial(Small, torch.float32)
    found, wanted = (fit(make, tiles, precision=precision) for tiles in (2, None))
    for name, value in wanted.state_dict().items():
        assert found.state_dict()[name].dtype == value.dtype
    if precision == "64-true":
        assert_same_module(found, wanted)


class Examined(Small):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch))


def test_a_test_from_a_checkpoint_leaves_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    module = Examined()
    with alone():
        trained = Trainer(accelerator="cpu", max_steps=1, **QUIET)
        trained.fit(module, loader())
        trained.save_checkpoint(path)
    other = Examined()
    runner = Trainer(accelerator="cpu", strategy=TiledStrategy(2), **QUIET)
    runner.test(other, loader(), ckpt_path=path)
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


@dataclass
class Notes:
    counts: list[int] = field(default_factory=list[int])


class Noting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.last, self.notes = np.zeros(2), deque[float](maxlen=2), Notes()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.matrix[0] += 1
        self.last.append(float(self.loss(batch)))
        self.notes.counts.append(batch_idx)


def test_arrays_deques_and_dataclasses_of_a_module_are_left() -> None:
    found, wanted = Noting(), Noting()
    with alone():
        Trainer(accelerator="cpu", **QUIET).validate(wanted, loader(), verbose=False)
    Trainer(accelerator="cpu", strategy=TiledStrategy(2), **QUIET).validate(
        found, loader(), verbose=False
    )
    assert found.matrix.tolist() == wanted.matrix.tolist() == [3, 0]
    assert found.notes == wanted.notes
    assert found.last.maxlen == 2
    assert_same(torch.tensor(found.last), torch.tensor(wanted.last))


class CastNoting(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.dtypes = [str(self.net[0](batch.float()).dtype)]
        return self.net(batch.float()).float().square().mean()


def test_autocast_around_a_run_holds_in_all_tiles() -> None:
    module = CastNoting(torch.float32)
    runner = Trainer(accelerator="cpu", max_steps=1, strategy=TiledStrategy(2), **QUIET)
    with torch.autocast("cpu", torch.bfloat16):
        runner.fit(module, loader())
    assert module.dtypes == ["torch.bfloat16"]


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_function_mode_around_a_run_is_refused() -> None:
    runner = Trainer(accelerator="cpu", max_steps=1, strategy=TiledStrategy(2), **QUIET)
    with Doubling(), pytest.raises(RuntimeError, match=r"Doubling.*within the step"):
        runner.fit(Small(), loader())


class Reading(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with allow_gather():
            self.seen = self(batch).detach().numpy()
        return super().training_step(batch, batch_idx)


class ReadingAlone(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self(batch).detach().numpy()
        return super().training_step(batch, batch_idx)


def test_arrays_of_fields_in_files_are_those_of_the_whole_field(tmp_path: Path) -> None:
    module, wanted = Reading(), fit(Reading, None, max_epochs=1)
    strategy = TiledStrategy(2, tile_memory=str(tmp_path))
    Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **QUIET).fit(module, loader())
    assert_same(torch.tensor(module.seen), torch.tensor(wanted.seen))


def test_arrays_of_fields_in_files_are_refused_by_their_own_name(tmp_path: Path) -> None:
    strategy = TiledStrategy(2, tile_memory=str(tmp_path))
    runner = Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **QUIET)
    with pytest.raises(RuntimeError, match=r"cannot run Tensor\.numpy"):
        runner.fit(ReadingAlone(), loader())


class Keeping(Small):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self(batch)
        self.pictures = {"first": found[0], "mean": float(found.mean())}


@pytest.mark.parametrize("files", [False, True])
def test_fields_that_a_module_keeps_are_whole_afterwards(tmp_path: Path, files: bool) -> None:
    found, wanted = Keeping(), Keeping()
    strategy = TiledStrategy(3, tile_memory=str(tmp_path) if files else None)
    with alone():
        Trainer(accelerator="cpu", **QUIET).validate(wanted, loader(), verbose=False)
    Trainer(accelerator="cpu", strategy=strategy, **QUIET).validate(found, loader(), verbose=False)
    assert type(found.pictures["first"]) is Tensor
    assert_same(torch.as_tensor(found.pictures["first"]), torch.as_tensor(wanted.pictures["first"]))
