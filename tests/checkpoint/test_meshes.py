"""Saved on 2 x 2 processes, resumed on any others, by us and without us: one trajectory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.amp import GradScaler

from lightning_shard.checkpoint.state import full_optimizer_state
from tests import pool
from tests.checkpoint.tiny import SaveAt, fit, loader, mean_over_ranks, quiet, tiny
from tests.pairs import choose
from tests.training import Losses, shared_path

MESHES = {
    "4x1": (4, (1,)), "2x2": (4, (2,)), "1x4": (4, (4,)), "1x(2x2)": (4, (2, 2)),
    "2x1": (2, (1,)), "1x2": (2, (2,)),
}  # fmt: skip


def slow(mesh: str) -> Any:
    return pytest.param(mesh, marks=pytest.mark.slow)


def smooth(optimizers: int) -> LightningModule:
    """Without what depends on the mesh by its nature: statistics of a replica's part of a batch."""
    return tiny(dropout=0.0, norm=False, optimizers=optimizers)


def save(folder: str, optimizers: int, options: dict[str, Any]) -> None:
    path, step = Path(folder), 9 * optimizers
    module = smooth(optimizers)
    saves = SaveAt(path / "middle.ckpt", step), SaveAt(path / "end.ckpt", 6 * optimizers, "epoch")
    losses, state, _ = fit((2,), *saves, module=module, **options)
    means = mean_over_ranks(losses)
    states = [full_optimizer_state(o, module) for o in unwrapped(module)]
    if dist.get_rank() == 0:
        torch.save({"losses": means, "state": state, "optimizers": states}, path / "expected.pt")


def unwrapped(module: LightningModule) -> list[torch.optim.Optimizer]:
    wrapped = module.optimizers()
    return [o.optimizer for o in (wrapped if isinstance(wrapped, list) else [wrapped])]


def resume(folder: str, optimizers: int, domain: tuple[int, ...]) -> None:
    """Losses, weights and optimizer states at the end are those of the uninterrupted run."""
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    for name, batches in (("middle.ckpt", 9), ("end.ckpt", 6)):
        module = smooth(optimizers)
        losses, state, _ = fit(domain, module=module, path=Path(folder) / name)
        torch.testing.assert_close(mean_over_ranks(losses), expected["losses"][batches:], **CLOSE)
        torch.testing.assert_close(state, expected["state"], **CLOSE)
        for optimizer, wanted in zip(unwrapped(module), expected["optimizers"], strict=True):
            found = full_optimizer_state(optimizer, module)["state"]
            torch.testing.assert_close(found, wanted["state"], **CLOSE)


CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module", params=["file", "directory"])
def saved(request, tmp_path_factory):
    options = {"checkpoint_format": "single" if request.param == "file" else "sharded"}
    folder = str(tmp_path_factory.mktemp("saved"))
    pool.pool_of(4).run(save, {"folder": folder, "optimizers": 1, "options": options})
    pool.pool_of(2)
    return folder


@pytest.mark.quick_rows("1x2-file")
@pytest.mark.parametrize(
    ("mesh", "saved"),
    choose(["1x2", "1x(2x2)", *map(slow, ["4x1", "2x2", "1x4", "2x1"])], ["file", "directory"]),
    indirect=["saved"],
)
def test_any_mesh(saved, mesh):
    ranks, domain = MESHES[mesh]
    pool.pool_of(ranks).run(resume, {"folder": saved, "optimizers": 1, "domain": domain})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"checkpoint_format": "sharded"}],
    ids=["file", "dir"],
)
def test_several_optimizers_on_another_mesh(options, tmp_path):
    given = {"folder": str(tmp_path), "optimizers": 2}
    pool.pool_of(4).run(save, {**given, "options": options})
    pool.pool_of(2).run(resume, {**given, "domain": (2,)})


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"checkpoint_format": "sharded"}],
    ids=["file", "dir"],
)
def test_scaler_of_half_precision(options):
    path = shared_path("some.ckpt")

    def plugin(scale: float) -> MixedPrecision:
        scaler = GradScaler("cpu", init_scale=scale, growth_interval=3)
        return MixedPrecision("16-mixed", "cpu", scaler)

    first, second = plugin(64.0), plugin(1.0)
    options = options | {"sharding": "full"}  # torch scales no complex gradients of the CPU
    losses, state, _ = fit((1,), SaveAt(path, 4), precision_plugin=first, **options)
    resumed, resumed_state, _ = fit((1,), path=path, precision_plugin=second)
    assert resumed == losses[4:]
    assert first.state_dict() == second.state_dict()
    assert second.state_dict()["scale"] > 64
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())


@pytest.mark.slow
def test_one_process(saved):
    """In this process, and so at last: the pools are forked from it."""
    resume(saved, 1, (1,))


class GoesOn(Callback):
    """Lightning alone does not go on with the random numbers of a checkpoint."""

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.numbers = checkpoint["lightning_shard"]["random"][0]["torch"]

    def on_train_start(self, trainer, pl_module):
        torch.set_rng_state(self.numbers)
        torch.empty((), dtype=torch.int64).random_()  # the seed that the loader has drawn before


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["file"], indirect=True)
def test_without_us(saved):
    """A directory is exported first: test_checkpoints_export.py."""
    expected, losses = torch.load(Path(saved) / "expected.pt", weights_only=True), Losses()
    runner = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[losses, GoesOn()],
        plugins=LightningEnvironment(), use_distributed_sampler=False,
    )  # fmt: skip
    module, data = smooth(1), loader(1)
    path = Path(saved) / "end.ckpt"
    with quiet():
        runner.fit(module, data, loader(1, 4), ckpt_path=path)
    torch.testing.assert_close(torch.tensor(losses.values), expected["losses"][6:].float())
    torch.testing.assert_close(module.state_dict(), expected["state"], **CLOSE)
