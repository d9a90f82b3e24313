"""A hook for gradients that one rank alone registers: refused where it would change numbers."""

import warnings

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard import launch
from lightning_shard.fsdp import same_blocks
from lightning_shard.processes.failures import lone_waits
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded


def halved(gradient):
    return gradient * 0.5


def halve(parameter):
    parameter.grad.mul_(0.5)


class Hooks(Featured):
    """Rank 0 does something to gradients in its second step, the others do not."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen = kind, []

    def training_step(self, batch, batch_idx):
        lone = batch_idx == 1 and self.global_rank == 0
        y, scale = self.network(batch["x"]), self.weight.sum()
        if lone and self.kind == "split":
            y.register_hook(halved)
        elif lone and self.kind == "plain":
            scale.register_hook(halved)
        elif lone and self.kind == "parameter":
            self.network[0].weight.register_hook(halved)
        elif lone and self.kind == "accumulated":
            self.network[0].weight.register_post_accumulate_grad_hook(halve)
        elif lone and self.kind == "looks":
            y.register_hook(lambda gradient: self.seen.append(gradient.shape))
            y.retain_grad()
        elif batch_idx == 1 and self.kind == "frozen":
            self.network[0 if lone else 3].weight.requires_grad_(False)
        return (y * scale + self.offset - batch["y"]).square().mean()


def fit(kind, domain):
    same_blocks.LOOK_S, lone_waits.LOOK_S, lone_waits.STUCK_S = 0.1, 0.2, 1.0
    warnings.simplefilter("ignore")  # a launched rank begins with pytest's filters
    options = {"limit_train_batches": 3, "limit_val_batches": 0}
    fit_sharded(Hooks(kind), domain, strategy={"sharding": "none"}, **options)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


WORDS = {
    "split": "changes the gradient of a split tensor in a hook",
    "plain": "gives a hook the whole gradient of a tensor",
    "parameter": "gives hooks of a parameter the mean of its gradient",
    "accumulated": "gives hooks of a parameter the mean of its gradient",
    "frozen": r"averages the gradients of 7 parameters \(checksum \w+ of which\)",
}


@pytest.mark.parametrize(
    ("kind", "domain", "processes"),
    [
        ("split", (2,), 2),
        slow("parameter", (1,), 2),
        slow("frozen", (2,), 2),
        slow("plain", (2,), 2),
        slow("accumulated", (2,), 2),
        slow("split", (2,), 4),
    ],
)
def test_a_hook_that_changes_gradients_of_one_rank(kind, domain, processes):
    with pytest.raises(ProcessRaisedException, match=f"do different things: .*{WORDS[kind]}"):
        launch(fit, kind, domain, processes=processes, timeout_s=60)


@pytest.mark.spmd(2)
def test_a_hook_of_one_rank_may_look_at_its_part():
    options = {"limit_train_batches": 3, "limit_val_batches": 0}
    alone, module = Hooks("none"), Hooks("looks")
    fit_alone(alone, **options)
    fit_sharded(module, (2,), **options)
    assert module.seen == [torch.Size((4, 1, 9, 7))] * (module.global_rank == 0)
    assert_same_state(module, alone)
