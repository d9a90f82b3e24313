"""A run goes on through several resumes, in other modes and on other meshes, as without a break."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)

from tests import pool
from tests.checkpoint.tiny import SaveAfterBatch, SaveAt, fit, mean_over_ranks, tiny
from tests.pairs import choose
from tests.training import shared_path

# the step after which a part ends, the ranks, the domain, the mode, the format of its checkpoint
CHAINS = {
    "modes": [
        (3, 2, (2,), "none", "single"),
        (7, 2, (2,), "full", "sharded"),
        (9, 2, (2,), "gradients", "single"),
        (12, 2, (2,), "none", "single"),
    ],
    "meshes": [
        (2, 4, (2,), "hybrid", "single"),
        (5, 3, (3,), "none", "sharded"),
        (10, 2, (1,), "full", "single"),
        (12, 2, (2,), "none", "single"),
    ],
}
AVERAGES = {"none": list, "ema": lambda: [EMAWeightAveraging(decay=0.8)]}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def smooth():
    return tiny(dropout=0.0, norm=False)


def part(folder: str, index: int, chain: str, average: str) -> None:
    """A part of a chain; the first one goes on to the end, as the run without a break."""
    end, _, domain, mode, form = CHAINS[chain][index]
    path, before = (Path(folder) / f"{i}.ckpt" for i in (index, index - 1))
    save = SaveAt(path, end, "batch" if end < 12 else "epoch")
    losses, state, _ = fit(
        domain, *AVERAGES[average](), save, module=smooth(), path=before if index else None,
        sharding=mode, checkpoint_format=form,
    )  # fmt: skip
    means = mean_over_ranks(losses)
    if dist.get_rank() == 0:
        torch.save({"losses": means, "state": state}, Path(folder) / f"{index}.pt")


@pytest.mark.parametrize(
    ("chain", "average"),
    choose(["modes", pytest.param("meshes", marks=pytest.mark.slow)], AVERAGES),
)
def test_a_chain(chain, average, tmp_path):
    given = {"folder": str(tmp_path), "chain": chain, "average": average}
    for index, (_, ranks, *_) in enumerate(CHAINS[chain]):
        pool.pool_of(ranks).run(part, given | {"index": index})
    parts = [torch.load(tmp_path / f"{i}.pt", weights_only=True) for i in range(len(CHAINS[chain]))]
    begun = 0
    for (end, *_), found in zip(CHAINS[chain], parts, strict=True):
        torch.testing.assert_close(found["losses"], parts[0]["losses"][begun:], **CLOSE)
        torch.testing.assert_close(found["state"], parts[0]["state"], **CLOSE)
        begun = end


def assert_goes_on(callback, save, begin, module=smooth):
    """A run that is resumed where `save` has saved has the losses from `begin` on, and the end."""
    losses, state, _ = fit((2,), callback(), save, module=module())
    resumed, resumed_state, _ = fit((2,), callback(), module=module(), path=save.path)
    assert resumed == losses[begin:]
    assert all(torch.equal(resumed_state[key], value) for key, value in state.items())


@pytest.mark.spmd(2)
def test_averages_of_weights_go_on_inside_an_epoch():
    """Lightning leaves the rates of SWA out until the next epoch."""
    save = SaveAt(shared_path("middle.ckpt"), 4)
    assert_goes_on(lambda: StochasticWeightAveraging(1e-3, 1, annealing_epochs=2), save, 4)


@pytest.mark.spmd(2)
def test_accumulation_by_epoch_goes_on_inside_an_epoch():
    """Lightning accumulates nothing until the next epoch."""
    save = SaveAfterBatch(shared_path("middle.ckpt"), 0, 1)
    assert_goes_on(lambda: GradientAccumulationScheduler({0: 2, 1: 3}), save, 2)


@pytest.mark.spmd(2)
def test_statistics_of_averaged_weights_go_on_inside_their_epoch():
    """Lightning counts none, and ends the run in an error."""
    save = SaveAfterBatch(shared_path("statistics.ckpt"), 2, 2)
    assert_goes_on(lambda: StochasticWeightAveraging(1e-3, 1), save, -3, module=tiny)


ENDED = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "swa": lambda: StochasticWeightAveraging(1e-3, 1),
}


@pytest.mark.quick_rows("ema-full")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("average", "mode"), [("ema", "none"), ("ema", "full"), ("swa", "none")])
def test_a_run_that_had_ended_has_its_averages(average, mode):
    """Lightning gives the module the weights with which it would train on."""
    path = shared_path("ended.ckpt")
    save = SaveAt(path, 12, "epoch")
    _, state, _ = fit((2,), ENDED[average](), save, module=smooth(), sharding=mode)
    losses, again, _ = fit((2,), ENDED[average](), module=smooth(), path=path, sharding=mode)
    assert losses == []
    assert all(torch.equal(again[key], value) for key, value in state.items())


@pytest.mark.spmd(2)
def test_gradients_that_were_accumulated_are_said_to_be_lost():
    path, heard = shared_path("accumulated.ckpt"), []
    for batch in (0, 1):
        fit((2,), SaveAfterBatch(path, 0, batch), module=smooth(), accumulate_grad_batches=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit((2,), module=smooth(), path=path, accumulate_grad_batches=2)
        words = "after 1 of the 2 batches whose gradients a step adds up"
        heard.append(sum(words in str(each.message) for each in told))
    assert heard == [int(dist.get_rank() == 0), 0]
