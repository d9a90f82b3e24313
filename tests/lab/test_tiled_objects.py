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
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_shard import TiledStrategy, gather
from tests.lab.test_tiled_training import QUIET, loader, picture
from tests.parity import assert_same
from tests.training import Fields

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
    runner = Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=max_epochs, precision=precision, **QUIET
    )
    runner.fit(module, loader())
    return module


def assert_same_module(found: Small, wanted: Small) -> None:
    assert_same(torch.tensor(found.losses), torch.tensor(wanted.losses))
    states = found.state_dict(), wanted.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert states[0][name].dtype == value.dtype
        assert_same(states[0][name].double(), value.double(), name)


@pytest.mark.slow_rows("Compiled")
@pytest.mark.parametrize(
    "make", [HookOverSelf, ActivationOverParameter, ScheduleOverSelf, Compiled]
)
def test_functions_over_a_module_and_compiled_parts(make: Any) -> None:
    assert_same_module(fit(make, 2), fit(make, None))


class Decay(Callback):
    """Holds a part of the module, and changes it."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            self.part.weight.mul_(0.9)


class Harder(Fields):
    """A dataset whose samples a callback makes larger."""

    level = 1.0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * self.level


class Curriculum(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.train_dataloader
        data.dataset.level += 1


_drawn = torch.Generator()


class Counting(Small):
    """Counts in its class, and draws from a generator of a module of Python."""

    count = 0

    def loss(self, x: Tensor) -> Tensor:
        type(self).count += 1
        scale = torch.rand((), generator=_drawn, dtype=torch.float64)
        return super().loss(x * scale) * type(self).count


class MadeInSetup(Small):
    def setup(self, stage: str) -> None:
        torch.manual_seed(2)
        self.head = nn.Conv2d(3, 3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Whole(Small):
    """Compiles all of its network, as most users do."""

    def __init__(self) -> None:
        super().__init__()
        compiled: Any = torch.compile(self.net, backend="eager")
        self.net = compiled


def run_objects(make: Any, tiles: int | None) -> Small:
    _drawn.manual_seed(4)
    Counting.count = 0
    module = make()
    held = Decay(getattr(module.net, "_orig_mod", module.net)[3])
    runner = Trainer(
        accelerator="cpu", strategy="auto" if tiles is None else TiledStrategy(tiles),
        max_epochs=2, callbacks=[held, Curriculum()], **QUIET,
    )  # fmt: skip
    runner.fit(module, DataLoader(Harder(picture, 3)))
    return module


@pytest.mark.parametrize("make", [Small, Counting, MadeInSetup, Whole])
def test_callbacks_with_parts_datasets_classes_and_layers_of_setup(make: Any) -> None:
    """The user's objects are his own, each once."""
    assert_same_module(run_objects(make, 3), run_objects(make, None))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_true_precision_leaves_the_weights_in_it(precision: Any) -> None:
    make = partial(Small, torch.float32)
    found, wanted = (fit(make, tiles, precision=precision) for tiles in (2, None))
    for name, value in wanted.state_dict().items():
        assert found.state_dict()[name].dtype == value.dtype
    if precision == "64-true":
        assert_same_module(found, wanted)


class Recomputed(Small):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def test_blocks_are_computed_again_under_true_precision() -> None:
    """A step has another default dtype than its backward pass, where torch compares dtypes."""
    make = partial(Recomputed, torch.float32)
    assert_same_module(*(fit(make, tiles, precision="64-true") for tiles in (2, None)))


class Examined(Small):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch))


def test_a_test_from_a_checkpoint_leaves_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    module = Examined()
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


def test_autocast_around_a_run_holds() -> None:
    module = CastNoting(torch.float32)
    runner = Trainer(accelerator="cpu", max_steps=1, strategy=TiledStrategy(2), **QUIET)
    with torch.autocast("cpu", torch.bfloat16):
        runner.fit(module, loader())
    assert module.dtypes == ["torch.bfloat16"]


class Doubling(TorchFunctionMode):
    """Doubles what batch norm gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.batch_norm else found


def test_a_function_mode_around_a_run_holds() -> None:
    with Doubling():
        found, wanted = fit(Small, 2), fit(Small, None)
    assert_same_module(found, wanted)
    assert not torch.tensor(found.losses).isclose(torch.tensor(fit(Small, None).losses)).any()


class Reading(Small):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self(batch).detach().numpy()
        self.shown = repr(self(batch)[0, 0, 0, 0].detach())
        return super().training_step(batch, batch_idx)


def test_arrays_of_fields_are_those_of_the_whole_field(tmp_path: Path) -> None:
    module, wanted = Reading(), fit(Reading, None, max_epochs=1)
    strategy = TiledStrategy(2, tile_memory=str(tmp_path))
    Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, **QUIET).fit(module, loader())
    assert_same(torch.tensor(module.seen), torch.tensor(wanted.seen))


class Keeping(Small):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self(batch)
        self.pictures = {"first": found[0], "mean": float(found.mean())}


@pytest.mark.parametrize("files", [False, True])
def test_fields_that_a_module_keeps_can_be_gathered_afterwards(tmp_path: Path, files: bool) -> None:
    found, wanted = Keeping(), Keeping()
    strategy = TiledStrategy(3, tile_memory=str(tmp_path) if files else None)
    Trainer(accelerator="cpu", **QUIET).validate(wanted, loader(), verbose=False)
    Trainer(accelerator="cpu", strategy=strategy, **QUIET).validate(found, loader(), verbose=False)
    kept: Any = found.pictures["first"]
    assert_same(gather(kept), torch.as_tensor(wanted.pictures["first"]))
    assert_same(kept.flip(-1).sum(), gather(kept).sum())  # and computed with
