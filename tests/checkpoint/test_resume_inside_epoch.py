"""A run that stops inside an epoch and resumes equals the uninterrupted one, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_shard.checkpoint.state import full_module_state
from tests.pairs import choose
from tests.training import Losses, loader, make, shared_path, trainer, weights_count_as_large

SAVE_AT = 4


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


class SaveOnce(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == SAVE_AT:
            trainer.save_checkpoint(self.path)


def run(domain, name, *callbacks, path=None, epochs=2):
    module, losses = make(name, torch.float32), Losses()
    runner = trainer(domain, callbacks=[losses, *callbacks], max_epochs=epochs)
    batch_size = 4 // (dist.get_world_size() // torch.tensor(domain).prod().item())
    with weights_count_as_large(name):
        runner.fit(module, loader(name, torch.float32, batch_size, 20), ckpt_path=path)
    return losses.values, full_module_state(module)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "domain"),
    choose([slow("dense_fno"), "simple_cnn", *map(slow, ["tfno", "large_tfno"])], [(2,), (2, 2)]),
    ids=str,
)
def test_resume_inside_an_epoch(name, domain):
    path = shared_path("middle.ckpt")
    losses, state = run(domain, name, SaveOnce(path))
    assert len(losses) == 10
    resumed, resumed_state = run(domain, name, path=path)
    assert resumed == losses[SAVE_AT:]
    for key, value in state.items():
        assert torch.equal(resumed_state[key], value), key


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", choose(["tfno", "dense_fno", "large_tfno"], fast=["large_tfno"]))
def test_checkpoint_is_a_plain_one(name):
    """Names, shapes and dtypes of the plain module; loads without the strategy."""
    path = shared_path("middle.ckpt")
    run((2,), name, SaveOnce(path), epochs=1)
    saved = torch.load(path, weights_only=True)
    plain = make(name, torch.float32)
    expected = {key: (v.shape, v.dtype) for key, v in plain.state_dict().items()}
    assert {key: (v.shape, v.dtype) for key, v in saved["state_dict"].items()} == expected
    plain.load_state_dict(saved["state_dict"])
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer_states"][0])
    for p, entry in optimizer.state.items():
        assert entry["exp_avg"].shape == p.shape
        assert entry["exp_avg"].dtype == p.dtype


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("name", "meshes"),
    choose(
        ["simple_cnn", "dense_fno", slow("large_tfno")],
        [((2,), (4,)), ((4,), (1,)), ((2, 2), (2,))],
    ),
    ids=str,
)
def test_resume_on_another_mesh(name, meshes):
    path = shared_path("middle.ckpt")
    losses, _ = run(meshes[0], name, SaveOnce(path))
    means = torch.tensor(losses)
    dist.all_reduce(means)
    resumed = torch.tensor(run(meshes[1], name, path=path)[0])
    dist.all_reduce(resumed)
    torch.testing.assert_close(resumed, means[SAVE_AT:], rtol=1e-5, atol=0)
