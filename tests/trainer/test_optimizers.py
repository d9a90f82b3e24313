"""Optimizers that cannot update shards are refused by name; the way out that this names works."""

import re
import time

import pytest
import timm.optim
import torch
import transformers
from lightning.pytorch import LightningModule
from torch import nn
from torch.multiprocessing import ProcessExitedException

from lightning_shard import launch
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded


def transformers_adafactor(parameters):
    return transformers.Adafactor(parameters, lr=0.01, relative_step=False)


def few_iterations(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


OPTIMIZERS = {
    "torch.optim.Adafactor": (torch.optim.Adafactor, "Adafactor"),
    "torch.optim.LBFGS": (few_iterations, "LBFGS"),
    "transformers.Adafactor": (transformers_adafactor, "Adafactor"),
    "timm.optim.AdamP": (timm.optim.AdamP, "AdamP"),
}

FAILS_FIRST_WHERE_EMPTY = {"timm.optim.AdamP"}

REFUSED = "optimizer {} cannot update sharded parameters"
SHARDS = {"sharding": "full"}


class Chosen(Featured):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def configure_optimizers(self):
        return OPTIMIZERS[self.name][0](self.parameters())


class Langevin(torch.optim.SGD):
    """Begins with random numbers, and adds more in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("velocity", torch.empty_like(p).normal_(0.0, 0.1))
            p.add_(state["velocity"] + torch.randn_like(p), alpha=0.01)
        return loss


@pytest.mark.quick_rows("full")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_what_draws_random_numbers(sharding):
    """The numbers are those that one process draws for whole parameters."""
    modules = Featured(), Featured()
    for module in modules:
        module.configure_optimizers = lambda m=module: Langevin(m.parameters(), lr=0.1)
    torch.manual_seed(4)
    fit_alone(modules[0])
    torch.manual_seed(4)
    fit_sharded(modules[1], (3,), strategy={"sharding": sharding})
    assert_same_state(modules[1], modules[0])


def assert_refused(name):
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- torch's, with our note
        fit_sharded(Chosen(name), (2,), limit_train_batches=1, strategy=SHARDS)
    note = caught.value.__notes__[0]
    assert REFUSED.format(OPTIMIZERS[name][1]) in note


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - FAILS_FIRST_WHERE_EMPTY))
def test_what_cannot_update_shards(name):
    if name == "torch.optim.Adafactor" and torch.__version__.startswith("2.11."):
        expected, found = Chosen(name), Chosen(name)  # it can there
        fit_alone(expected, limit_val_batches=0)
        fit_sharded(found, (2,), limit_val_batches=0, strategy=SHARDS)
        assert_same_state(found, expected)
    else:
        assert_refused(name)


@pytest.mark.quick_rows("torch.optim.LBFGS", "timm.optim.AdamP")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_way_out(name):
    expected, found = Chosen(name), Chosen(name)
    fit_alone(expected, limit_val_batches=0)
    domain = (2,)
    fit_sharded(found, domain, limit_val_batches=0, strategy={"sharding": "none"})
    assert_same_state(found, expected)


def refuse_and_wait(name):
    assert_refused(name)
    time.sleep(60)  # longer than the guard of rank 0 waits


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAILS_FIRST_WHERE_EMPTY))
def test_a_rank_that_waits_for_one_that_fails_first_says_why(name, capfd):
    """In processes of their own: the rank that waits is ended."""
    with pytest.raises(ProcessExitedException, match="rank 0 ended"):
        launch(refuse_and_wait, name, processes=4, timeout_s=60)
    told = f"[rank 0] ended, because another rank failed first: .*{REFUSED.format('AdamP')}"
    assert re.search(told.replace("[rank 0]", "\\[rank 0\\]"), capfd.readouterr().err)


class Matrices(LightningModule):
    """A tall and a wide matrix, of fewer rows than there are ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Sequential(nn.Linear(7, 9, bias=False), nn.Tanh(), nn.Linear(9, 2, False))
        self.double()

    def training_step(self, batch, batch_idx):
        return (self.network(batch["x"].mean(2)) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.Muon(self.parameters(), lr=0.05)


@pytest.mark.quick_rows("domain0")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(2,), (4,)])
def test_muon_needs_whole_matrices(domain):
    with pytest.raises(NotImplementedError, match=r"Muon computes with whole .*sharding='none'"):
        fit_sharded(Matrices(), domain, strategy=SHARDS)
    expected, found = Matrices(), Matrices()
    fit_alone(expected)
    fit_sharded(found, domain, strategy={"sharding": "none"})
    assert_same_state(found, expected)
