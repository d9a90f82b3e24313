"""Programs of research, each on ranks and in one process: weights and all that is logged."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torchmetrics import Metric

from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.trainer.featured import QUIET
from tests.trainer.habit_programs import HABITS
from tests.trainer.research_programs import PROGRAMS as RESEARCH

PROGRAMS = RESEARCH | HABITS
SHORT: dict[str, Any] = {
    "limit_train_batches": 3,
    "limit_val_batches": 2,
    "num_sanity_val_steps": 0,
}
BATCH = 4


def seed() -> None:
    torch.manual_seed(6)
    random.seed(6)
    np.random.seed(6)  # noqa: NPY002 - what the programs draw from


def check(name: str, domain: tuple[int, ...]) -> None:
    kind = PROGRAMS[name]
    options: dict[str, Any] = SHORT | {"max_epochs": kind.epochs}
    alone, module = kind(), kind()
    for metric in alone.modules():
        if isinstance(metric, Metric):
            metric._to_sync = False  # with the other ranks of the test
    settings: dict[str, Any] = QUIET | options
    runner = Trainer(
        devices=1, plugins=LightningEnvironment(),
        callbacks=[make() for make in kind.callbacks], **settings,
    )  # fmt: skip
    seed()
    with mock.patch.object(rank_zero_only, "rank", 0):  # each rank runs it alone
        alone.fit(runner, BATCH)
    sharded = training.trainer(
        domain, strategy={"exact_random": True} | kind.strategy,
        callbacks=[make() for make in kind.callbacks], **options,
    )  # fmt: skip
    seed()
    module.fit(sharded, BATCH * domain[0] // sharded.strategy.world_size)
    found = full_module_state(module)
    expected = {name.replace("_orig_mod.", ""): x for name, x in alone.state_dict().items()}
    assert found.keys() == expected.keys()
    same(found, expected, 1e-9)
    logged, wanted = sharded.callback_metrics, runner.callback_metrics
    both: Any = logged if sharded.strategy.world_size > domain[0] else wanted
    assert logged.keys() == wanted.keys() or "drawn" in wanted
    both = set(both) - {"seconds"}  # of each rank
    same({k: logged[k] for k in both}, {k: wanted[k] for k in both}, 1e-6)
    assert wanted
    seen = getattr(alone, "seen", {})
    assert getattr(module, "seen", {}) == pytest.approx(seen, rel=1e-9)


def same(found: dict[str, Any], expected: dict[str, Any], rtol: float) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=rtol, atol=1e-10, check_dtype=False,
            msg=lambda m, k=key: f"{k}: {m}",
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_as_in_one_process(mesh: str, run_each: Callable[..., None]) -> None:
    # random numbers are drawn for a batch, and a batch of a replica is another one
    names = [n for n, kind in PROGRAMS.items() if mesh == "1x2" or kind.is_per_sample]
    run_each(4 if mesh == "2x2" else 2, check, {n: {"name": n, "domain": (2,)} for n in names})
