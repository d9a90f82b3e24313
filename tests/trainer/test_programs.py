"""Programs train as in one process, or end in a sentence: the table is in programs.py."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.fsdp import rank_barrier
from lightning_shard.trainer.report.tables import mesh_table
from tests.reference import computed_once
from tests.trainer.featured import Featured, fit_alone, fit_sharded, loader
from tests.trainer.programs import (
    ALWAYS_REFUSED,
    PER_REPLICA,
    PROGRAMS,
    REFUSED,
    make,
    page,
)

MESHES = {"1x2": (2, (2,)), "2x1": (2, (1,)), "2x2": (4, (2,))}
SHORT: dict[str, Any] = {"limit_train_batches": 3, "limit_val_batches": 0}


@computed_once
def alone(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = make(name)
    fit_alone(module, **SHORT)
    return dict(module.state_dict()), module.noted


def check(name: str, domain: tuple[int, ...], sharding: str) -> None:
    """Train it by the strategy, with small blocks of its own where it is sharded."""
    module = make(name)
    strategy = {"wrap": ["Block"], "sharding": sharding}
    if name in (REFUSED if sharding == "full" else ALWAYS_REFUSED):
        with pytest.raises(Exception, match=REFUSED[name]) as caught:
            fit_sharded(module, domain, strategy=strategy, **SHORT)
        notes = " ".join(getattr(caught.value, "__notes__", ()))
        sentence = f"{caught.value} {notes}"
        # with a way out
        way_out = ":" if name in ALWAYS_REFUSED or not notes else "sharding='none'"
        assert way_out in sentence or ";" in sentence, sentence
        return
    fit_sharded(module, domain, strategy=strategy, **SHORT)
    expected, noted = alone(name)
    found = full_module_state(module)
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-8, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert module.noted == pytest.approx(noted, rel=1e-6, abs=1e-10)


def cases(mesh: str) -> dict[str, dict[str, Any]]:
    """The programs that this mesh runs; a replica with its own samples differs from one process."""
    ranks, domain = MESHES[mesh]
    names = [n for n in PROGRAMS if n not in PER_REPLICA or ranks == domain[0]]
    if ranks > domain[0] == 1:  # then nothing is split
        names = [n for n in names if n not in ONLY_SPLIT]
    return {
        f"{sharding}: {n}": {"name": n, "domain": domain, "sharding": sharding}
        for n in names
        for sharding in MODES
    }


MODES = ("none", "full")
ONLY_SPLIT = {
    "FLOPs are counted in the step",
    "numpy() of a split field in the step",
}


def in_turn(mesh: str, every: bool) -> dict[str, dict[str, Any]]:
    """All programs, or a 96th of them for each mesh, each with one mode of sharding."""
    own, names = cases(mesh), list(PROGRAMS)
    if every:
        return own
    first = {"1x2": 0, "2x1": 32, "2x2": 64}[mesh]
    turns = ((names[i], MODES[i // 96 % 2]) for i in range(first, len(names), 96))
    chosen = (f"{sharding}: {name}" for name, sharding in turns)
    return {name: own[name] for name in chosen if name in own}


@pytest.mark.parametrize("mesh", MESHES)
def test_programs(mesh: str, run_each: Callable[..., None]) -> None:
    run_each(MESHES[mesh][0], check, in_turn(mesh, every=False))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_all_programs_on_each_mesh(mesh: str, run_each: Callable[..., None]) -> None:
    run_each(MESHES[mesh][0], check, in_turn(mesh, every=True))


@pytest.mark.spmd(2)
def test_shards_keep_what_waits_for_another_optimizer() -> None:
    """FSDP2 gives gradients to parameters that are switched off, beside those that wait there."""
    check("two optimizers in turns, each with gradients of two batches", (2,), "full")


class Draws(Featured):
    """Reads an array on all ranks, and one more on rank 0 alone."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch["x"].numpy().shape == (4, 1, 9, 7)
        if self.global_rank == 0:
            with (
                mock.patch.object(rank_barrier, "WAIT_S", 0.3),
                pytest.raises(
                    RuntimeError, match=r"on_train_batch_end.*ranks \[1\] did not.*numpy"
                ),
            ):
                batch["y"].tolist()
        dist.barrier()


ALONE: dict[str, Callable[[Any, Any], Any]] = {
    "reads the values": lambda module, x: x.numpy(),
    "uses a split tensor": lambda module, x: x.mean().item(),
    "runs LeavesOthers": lambda module, x: module(torch.ones(1, 1, 9, 7, dtype=x.dtype)),
}


class NoMeetings(Counter[Any]):
    """Counts from a number to which the other rank has never come."""

    def __missing__(self, key: Any) -> int:
        return 2 * 10**6


class LeavesOthers(Featured):
    """Does on rank 0 alone what all ranks must do, while the other goes on to the next batch."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        does = self.kinds[batch_idx]
        place = "in on_train_batch_end|outside of the steps"
        match = rf"rank 0 {does}.* ({place})|sharded.*ranks \[1\] did not, where rank 1"
        if self.global_rank == 0:
            with (
                mock.patch.object(rank_barrier, "_waits", NoMeetings()),
                pytest.raises(RuntimeError, match=match),
            ):
                ALONE[does](self, batch["x"])


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "kinds", [[*ALONE][:1], pytest.param([*ALONE][1:], marks=pytest.mark.slow)]
)
def test_a_rank_that_the_others_have_left_ends_without_waiting_for_them(kinds: list[str]) -> None:
    with mock.patch.object(rank_barrier, "WAIT_S", 100.0):
        module = LeavesOthers(kinds)
        options = {"limit_train_batches": len(kinds), "limit_val_batches": 0}
        fit_sharded(module, (2,), strategy={"sharding": "full"}, **options)


class Pictures(Logger):
    """Keeps arrays on rank 0, as Lightning's loggers draw there alone."""

    name, version = "pictures", 0
    log_metrics = log_hyperparams = lambda *_, **__: None

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []
        self._writer = Writer(self.drawn)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self._writer

    @rank_zero_only
    def log_image(self, key: str, images: list[Any]) -> None:
        self.drawn += [np.array(x) for x in images]


class Writer:
    """Draws twice what it is given once, and nothing of what it is only told."""

    def __init__(self, drawn: list[Any]) -> None:
        self.drawn = drawn

    def add_image(self, name: str, x: Any) -> None:
        self.drawn += [np.array(x), np.array(x)]

    def add_text(self, name: str, x: Any) -> None:
        assert name == "not drawn"


class Logs(Featured):
    """Gives split tensors and shards to a logger in a step and in a hook, as on one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logger: Any = self.logger
        logger.experiment.add_image("x", batch["x"])
        logger.experiment.add_text("not drawn", {"x": batch["x"]})
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logger: Any = self.logger
        logger.log_image("y", list(batch["y"]))
        for p in self.parameters():
            logger.experiment.add_image("p", p.detach())


@pytest.mark.quick_rows("domain1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(2,), (1,)])
def test_loggers_draw_split_tensors_and_shards_as_in_one_process(domain: tuple[int, ...]) -> None:
    alone, split = Pictures(), Pictures()
    options = {"limit_train_batches": 2, "limit_val_batches": 0}
    fit_sharded(Logs(), domain, **options, logger=split)
    fit_alone(Logs(), **options, logger=alone)
    if dist.get_rank() == 0:
        shapes = {tuple(p.shape) for p in Logs().parameters()}
        both = [  # a replica has its own samples
            [x for x in each.drawn if domain == (2,) or x.shape in shapes]
            for each in (alone, split)
        ]
        assert len(both[0]) > 8
        for expected, found in zip(*both, strict=True):
            assert found == pytest.approx(expected, rel=1e-10)
    else:
        assert not split.drawn


@pytest.mark.spmd(2)
def test_a_fast_run_has_several_stages() -> None:
    """Lightning gives it a logger of its own, whose class is changed as those of others are."""
    module = Featured()
    runner = fit_sharded(module, (2,), fast_dev_run=1, logger=Pictures())
    assert runner.test(module, loader(2), verbose=False)
    assert runner.test(module, loader(2), verbose=False)


@pytest.mark.spmd(2)
def test_arrays_of_split_fields_are_counted_and_read_by_all_ranks() -> None:
    words = "on_train_batch_end reads the values of a split tensor"
    told = pytest.warns(UserWarning, match=words) if dist.get_rank() == 0 else nullcontext()
    with told:
        runner = fit_sharded(Draws(), (2,), limit_train_batches=1, limit_val_batches=0)
    rows = mesh_table(runner, Draws(), "")[0]
    assert "on_train_batch_end: 1 times, 2,016 bytes on every rank" in rows


def test_there_are_many_programs() -> None:
    assert len(PROGRAMS) > 150
    assert dist.is_available()


def test_the_page_is_that_of_the_table() -> None:
    assert (Path(__file__).parents[2] / "docs/programs.md").read_text() == page()
