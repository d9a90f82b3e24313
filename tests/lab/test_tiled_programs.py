"""Programs in tiles on one device: what user code sees, reads, draws and predicts there."""

import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from lightning_shard import (
    PredictionWriter,
    TiledStrategy,
    predictions_in_order,
)
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.tensor.placement import is_field
from tests import training
from tests.lab.test_tiled_training import QUIET, Plain, Stranger, loader, picture, strategy_of
from tests.parity import assert_same
from tests.reference import computed_once
from tests.training import Fields, Losses

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders and loaders
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class Evens:
    """Batches of the samples of even numbers, in an order of its own."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        kept = [index for index in self.sampler if index % 2 == 0]
        return iter([kept[: self.batch_size], kept[self.batch_size :]])

    def __len__(self) -> int:
        return 2


class Batches(Callback):
    """Notes the mean of each batch in the order in which they come."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def _note(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self.means.append(batch.mean().item())

    on_predict_batch_end = on_validation_batch_end = on_test_batch_end = _note


class Evaluated(Stranger):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", (self(batch) - batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", (self(batch) - batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        found = self(batch)
        return {"field": found, "means": [found.mean((1, 2, 3))], "name": "a word"}


def _shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Fields(picture, 5), 2, shuffle=True, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": _shuffled,
    "several": lambda: [_shuffled(), loader(3), _shuffled(num_workers=1)],
    "batch sampler": lambda: DataLoader(
        Fields(picture, 5),
        batch_sampler=Evens(sampler=torch.utils.data.RandomSampler(range(5)), batch_size=2,
                            drop_last=False),
    ),
}  # fmt: skip
STAGES = [(stage, kind) for stage in ("predict", "validate", "test") for kind in LOADERS]


def evaluate(stage: str, kind: str, accelerator: str, tiles: Any) -> Any:
    runner = Trainer(
        accelerator=accelerator, strategy=strategy_of(accelerator, tiles),
        callbacks=[seen := Batches()], **QUIET,
    )  # fmt: skip
    torch.manual_seed(5)
    data = LOADERS[kind]()
    found = getattr(runner, stage)(Evaluated(is_noisy=True), data)
    drawn = torch.rand(2, dtype=torch.float64)
    return found, torch.tensor(seen.means, dtype=torch.float64), drawn, data, runner


def assert_evaluates(accelerator: str, tiles: Any, cases: Any) -> None:
    for stage, kind in cases:
        *wanted, _, one = evaluate(stage, kind, accelerator, None)
        *found, data, runner = evaluate(stage, kind, accelerator, tiles)
        numbers, tree = tree_flatten(wanted)
        others, other_tree = tree_flatten(found)
        assert tree == other_tree
        for number, other in zip(numbers, others, strict=True):
            assert type(number) is type(other)
            if isinstance(number, str):
                assert other == number
            else:
                assert_same(torch.as_tensor(other), torch.as_tensor(number), f"{stage} {kind}")
        for each in data if isinstance(data, list) else [data]:
            assert type(each) is DataLoader
        if stage == "predict" and kind == "shuffled":
            ordered = predictions_in_order(one, wanted[0])
            for row, other in zip(ordered, predictions_in_order(runner, found[0]), strict=True):
                assert_same(other["field"], row["field"])


@pytest.mark.quick_rows("validate-shuffled")
@pytest.mark.parametrize(("stage", "kind"), STAGES)
def test_evaluates_as_one_process(stage: str, kind: str) -> None:
    """Batches come in the order of one process, and predictions are whole, on the host."""
    assert_evaluates("cpu", 2, [(stage, kind)])


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_evaluates_on_a_device() -> None:
    assert_evaluates("xpu", (2, 2), STAGES[::4])


@pytest.mark.quick_rows("None")
@pytest.mark.parametrize("tiles", [None, 3])
def test_writes_predictions(tmp_path: Path, tiles: Any) -> None:
    """The first tile makes the file; the others wait for it in turns."""
    import zarr

    class Predicts(Evaluated):
        def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            found = self(batch)
            return {"field": found, "mean": found.mean((1, 2, 3))}

    runner = Trainer(
        accelerator="cpu", strategy="auto" if tiles is None else TiledStrategy(tiles),
        callbacks=[PredictionWriter(tmp_path / "found.zarr")], **QUIET,
    )  # fmt: skip
    module = Predicts()
    assert runner.predict(module, _shuffled(), return_predictions=False) is None
    with torch.no_grad():
        wanted = module(torch.stack([picture(index) for index in range(5)]))
    written: Any = zarr.open_group(tmp_path / "found.zarr", mode="r")
    assert_same(torch.from_numpy(written["field"][:]), wanted)
    assert_same(torch.from_numpy(written["mean"][:]), wanted.mean((1, 2, 3)))


class Random(Plain):
    """Draws in a hook on whole batches, in steps, in dropout, and from all generators."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(
            lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.Dropout2d(0.3),
                nn.Dropout(0.2),
                nn.Conv2d(8, 3, 1),
            )
        )
        self.scale: Tensor
        self.register_buffer("scale", torch.full((), 0.1, dtype=torch.float64))
        self.fails_at = fails_at

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        assert batch.device == self.device
        flipped = batch.flip(-1) if torch.rand(()) < 0.5 else batch
        return flipped + self.scale * torch.randn_like(flipped)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        whole = torch.randn(3, 1, 1, dtype=batch.dtype, device=batch.device)
        found = batch + torch.rand_like(batch) + whole + random.random() + np.random.rand()  # noqa: NPY002
        if batch_idx == self.fails_at:
            raise LookupError("a mistake of the module")
        return super().training_step(found, batch_idx)


def randomly(runner: Trainer, losses: Losses, fails_at: int = -1) -> Any:
    """Train, and draw on; the numbers come back as one tensor."""
    torch.manual_seed(11)
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    with suppress(LookupError):
        runner.fit(Random(fails_at), DataLoader(Fields(picture, 4), 2, shuffle=True))
    drawn = [torch.rand(()), torch.rand((), device=runner.strategy.root_device)]
    return torch.tensor(
        [*losses.values, *map(float, drawn), random.random(), np.random.rand()],  # noqa: NPY002
        dtype=torch.float64,
    )


def alone_randomly(accelerator: str, tiles: Any, fails_at: int = -1, **options: Any) -> Any:
    losses = Losses()
    strategy = strategy_of(accelerator, tiles, **options)
    runner = Trainer(
        accelerator=accelerator, strategy=strategy, callbacks=[losses], max_epochs=2, **QUIET
    )
    return randomly(runner, losses, fails_at)


def assert_random(accelerator: str) -> None:
    for fails_at, steps in ((-1, 4), (1, 1)):
        one = alone_randomly(accelerator, None, fails_at)
        exact = alone_randomly(accelerator, (2, 2), fails_at)
        assert len(one) == steps + 4
        assert_same(exact, one)
    own = alone_randomly(accelerator, 2, exact_random=False)
    assert not own[:4].isclose(alone_randomly(accelerator, None)[:4]).any()
    assert_same(alone_randomly(accelerator, 2, exact_random=False), own)


@pytest.mark.slow
def test_draws_the_numbers_of_one_process() -> None:
    """They go on as there, also after an exception; each tile draws its own if none are exact."""
    assert_random("cpu")


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_draws_the_numbers_of_one_process_on_a_device() -> None:
    assert_random("xpu")


class Seen(Callback):
    """Notes what user code sees on each tile, in a list outside of it."""

    def __init__(self, told: list[Any]) -> None:
        self.told, self.steps, self.losses = told, 0, list[float]()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps += 1
        self.losses.append(float(outputs["loss"]))
        self.told.append((trainer.global_rank, self.steps, pl_module is trainer.lightning_module))


class Looking(Stranger):
    """Looks at what the table of docs/tiles.md lists."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told, self.counts, self.history = told, dict[str, int](), list[int]()
        self.hits: Tensor
        self.register_buffer("hits", torch.zeros(()))

    def setup(self, stage: str) -> None:
        self.told.append(("setup", self.global_rank))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        trainer, logger = self.trainer, self.logger
        self.told.append(
            (self.global_rank, trainer.global_rank, trainer.world_size, trainer.is_global_zero,
             tuple(batch.shape), is_field(batch))
        )  # fmt: skip
        logging.getLogger("user").warning("word %d", batch_idx)
        self.counts["step"] = self.counts.get("step", 0) + 1
        self.history.append(batch_idx)
        self.hits += 1
        assert logger is not None
        logger.log_metrics({"own": float(self.global_step)}, self.global_step)
        self.log("loss rate", self.optimizers().param_groups[0]["lr"])  # pyright: ignore
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.counts["epoch"] = self.counts.get("epoch", 0) + 1


class Data(LightningDataModule):
    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told, self.setups = told, 0

    def prepare_data(self) -> None:
        self.told.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.setups += 1
        self.told.append("setup of data")

    def train_dataloader(self) -> Any:
        return loader(2)


def look(folder: Path, tiles: int | None) -> tuple[list[Any], Any]:
    told: list[Any] = []
    folder.mkdir()
    seen, module, data = Seen(told), Looking(told), Data(told)
    options: Any = QUIET | {"logger": CSVLogger(folder, "", "")}
    runner = Trainer(
        accelerator="cpu", strategy="auto" if tiles is None else TiledStrategy(tiles),
        max_epochs=2, callbacks=[seen, LearningRateMonitor()], log_every_n_steps=1, **options,
    )  # fmt: skip
    runner.fit(module, datamodule=data)
    assert module.trainer is runner
    assert runner.lightning_module is module
    assert runner.optimizers[0].param_groups[0]["params"][0] is next(module.parameters())
    file = (folder / "metrics.csv").read_text()
    return told, (
        seen.steps, seen.losses, module.counts, module.history, float(module.hits), data.setups,
        module.global_step, runner.world_size, runner.global_rank, file.splitlines()[0],
        [[float(x) for x in row.split(",") if x] for row in file.splitlines()[1:]],
    )  # fmt: skip


@pytest.mark.slow
def test_shows_user_code_what_the_docs_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The table of docs/tiles.md, row by row."""
    alone_told, one = look(tmp_path / "one", None)
    words = capsys.readouterr().out
    said = [record.message for record in caplog.records if record.name == "user"]
    caplog.clear()
    told, all_ = look(tmp_path / "tiles", 3)
    assert words.count("step") == 4
    assert capsys.readouterr().out == words
    assert [record.message for record in caplog.records if record.name == "user"] == said
    flat, tree = tree_flatten(one)
    others, other_tree = tree_flatten(all_)
    assert tree == other_tree  # counters, logged values and what is left afterwards
    for found, wanted in zip(others, flat, strict=True):
        assert found == (pytest.approx(wanted, rel=1e-10) if type(wanted) is float else wanted)
    assert alone_told == [(*each[:-1], False) if len(each) == 6 else each for each in told]
    assert told.count((0, 0, 1, True, (1, 3, 32, 32), True)) == 4  # whole fields, in tiles


class Manual(Stranger):
    """Two optimizers with schedulers, in manual optimization with clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = (self(batch) - batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            scheduler.step()
        return loss  # pyright: ignore[reportPossiblyUnboundVariable]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam([*self.first.parameters(), *self.norm.parameters()], eps=1e-4)
        last = torch.optim.SGD(self.last.parameters(), 1e-1, momentum=0.9)
        schedules = torch.optim.lr_scheduler
        return [first, last], [schedules.StepLR(first, 1, 0.5), schedules.ExponentialLR(last, 0.9)]


def few_rows(samples: int = 4) -> DataLoader[Any]:
    return DataLoader(Fields(lambda index: picture(index)[:, :8], samples))


class InFloat(Stranger):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.float()


# name: module, tiles, loader, options of the Trainer
PROGRAMS: dict[str, tuple[Any, Any, Any, Callable[[], dict[str, Any]]]] = {
    "manual": (Manual, 2, loader, dict),
    "3 of 8 rows, moving average, simple profiler": (
        Stranger, 3, few_rows,
        lambda: {"callbacks": [EMAWeightAveraging(decay=0.9)], "profiler": "simple"},
    ),
    "accumulated and clipped": (
        Stranger, (2, 2), loader, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
    ),
    "early stopping": (
        Stranger, 2, loader, lambda: {"callbacks": [EarlyStopping("loss_epoch", 0.3, 1)]}
    ),
    "more tiles than rows": (Stranger, 9, few_rows, dict),
    "clipped by value": (
        Stranger, 2, loader,
        lambda: {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ),
    "stochastic averaging": (
        Stranger, 2, loader,
        lambda: {"callbacks": [StochasticWeightAveraging(1e-2, 2, 1)], "max_epochs": 4},
    ),
    "bf16-mixed": (InFloat, 2, loader, lambda: {"precision": "bf16-mixed"}),
}  # fmt: skip
QUICK_PROGRAMS = list(PROGRAMS)[:3]


def program(name: str, *, tiled: bool) -> tuple[Any, dict[str, Any]]:
    make, tiles, data, options = PROGRAMS[name]
    more = {"accelerator": "cpu", "max_epochs": 2, **QUIET, **options()}
    losses = Losses()
    more["callbacks"] = [*more.get("callbacks", []), losses]
    runner = Trainer(strategy=TiledStrategy(tiles) if tiled else "auto", **more)
    module = make()
    runner.fit(module, data(4))
    counted = len(losses.values), runner.global_step, runner.current_epoch
    return counted, module.state_dict() | {"losses": torch.tensor(losses.values)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK_PROGRAMS else pytest.mark.slow) for n in PROGRAMS],
)
def test_runs_programs_as_one_process(name: str) -> None:
    counted, one = program(name, tiled=False)
    found, all_ = program(name, tiled=True)
    assert found == counted
    for key, value in one.items():
        if name == "bf16-mixed":  # sums of bfloat16 have another order
            torch.testing.assert_close(all_[key], value, rtol=2e-2, atol=2e-3)
        else:
            assert_same(all_[key], value, key)


class Failing(Stranger):
    """Fails in its second step, in Python or in an operation."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx != 1 else loss + self.does(batch)


def _fails(_: Tensor) -> Tensor:
    raise LookupError("a mistake of the module")


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        (_fails, LookupError, "a mistake of the module"),
        (lambda x: x @ x[:, :, :5], RuntimeError, "size"),
        (lambda x: torch.linalg.svdvals(x).sum(), UnsupportedOperationError, "svdvals"),
    ],
    ids=["python", "wrong call", "refused"],
)
def test_an_error_leaves_the_process_able_to_go_on(does: Any, error: Any, words: str) -> None:
    runner = Trainer(accelerator="cpu", max_epochs=1, strategy=TiledStrategy(3), **QUIET)
    before = {*threading.enumerate()}  # also tiles of other tests
    with pytest.raises(error, match=words):
        runner.fit(Failing(does), loader())
    new = {*threading.enumerate()} - before
    assert not [thread for thread in new if thread.name.startswith("tile")]
    Trainer(accelerator="cpu", fast_dev_run=True, strategy=TiledStrategy(2), **QUIET).fit(
        Stranger(), loader()
    )


class Hungry(Stranger):
    """Needs 10 GiB of the device for a field, of which one operator of a tile needs its part."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.empty_like(batch.expand(10 * 2**30 // (3 * 32 * 32 * 8), -1, -1, -1))
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.spmd(1, "xpu")
def test_asks_for_more_tiles_where_memory_ends() -> None:
    def run(tiles: Any) -> None:
        options: Any = QUIET | {"accelerator": "xpu", "fast_dev_run": True}
        Trainer(strategy=TiledStrategy(tiles), **options).fit(Hungry(), loader())

    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(2)
    assert "take more tiles, such as TiledStrategy([4])." in raised.value.__notes__[-1]
    run([4])


def half_in_tiles(folder: str) -> None:
    """Train an epoch in tiles, and two in one process; write a checkpoint, and the weights."""
    data = DataLoader(Fields(picture, 4), 2, shuffle=True)
    torch.manual_seed(5)
    runner = Trainer(accelerator="cpu", strategy=TiledStrategy(3), max_epochs=1, **QUIET)
    runner.fit(Stranger(), data)
    runner.save_checkpoint(f"{folder}/half.ckpt")
    torch.manual_seed(5)
    whole = Stranger()
    Trainer(accelerator="cpu", max_epochs=2, **QUIET).fit(whole, data)
    torch.save(whole.state_dict(), f"{folder}/whole.pt")


@computed_once
def _half_in_tiles() -> Any:
    """Run `half_in_tiles` in a process of its own, which is no rank of the tests."""
    folder = tempfile.mkdtemp()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    program = f"from tests.lab import test_tiled_programs as t; t.half_in_tiles({folder!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=kept, check=True)
    return f"{folder}/half.ckpt", torch.load(f"{folder}/whole.pt")


@pytest.mark.slow  # a process of its own trains the tiles
@pytest.mark.spmd(2)
def test_goes_on_on_two_ranks() -> None:
    path, whole = _half_in_tiles()
    module = Stranger()
    runner = training.trainer((2,), max_epochs=2)
    runner.fit(module, DataLoader(Fields(picture, 4), 2, shuffle=True), ckpt_path=path)
    assert runner.global_step == 4
    found = full_module_state(module)
    for name, value in whole.items():
        assert_same(found[name], value, name)
