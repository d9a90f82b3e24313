"""A planned step has no numbers; what it asks of them is answered as a run would answer it."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lab.predict import predict
from lightning_shard.lab.run import Task, on_each_rank, run_here

FIELDS = DataLoader([torch.ones(1, 2, 16, 8)], batch_size=None)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(2, 4, 3, padding=1)
        self.unused = nn.Linear(50, 50)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch):
        return self.checked(self.layer(batch).square().mean())

    def checked(self, loss):
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def planned(module, mesh=2, cluster="1x2xH100", **trainer):
    found = predict(module, FIELDS, mesh, cluster, **trainer)
    assert not found.is_measured
    return found


class Stops(Net):
    def checked(self, loss):
        if torch.isnan(loss) or not loss.isfinite():
            raise ValueError("no number")
        return loss


class Skips(Net):
    def checked(self, loss):
        return None if loss.isnan().sum() > 0 else loss


class StopsInManual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        for _ in range(2):
            loss = super().training_step(batch)
            if loss.isnan() | loss.isinf():
                raise ValueError("no number")
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class Drops(Net):
    """Leaves out updates by gradients that are no numbers."""

    def on_after_backward(self):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if any(torch.isnan(g).any() for g in grads) or not all(g.isfinite().all() for g in grads):
            self.zero_grad()


@pytest.mark.parametrize("kind", [Stops, Skips, StopsInManual, Drops])
def test_the_numbers_of_a_planned_step_are_finite(kind):
    states = planned(kind()).memory_by_cause["optimizer"]
    assert states == planned(Net()).memory_by_cause["optimizer"] > 0


@pytest.mark.parametrize("options", [{"detect_anomaly": True}, {"precision": "16-mixed"}])
def test_options_of_the_trainer_that_ask_for_finite_numbers(options):
    states = planned(Net(), **options).memory_by_cause["optimizer"]
    assert states == planned(Net()).memory_by_cause["optimizer"]


class Counts(Net):
    """Computes more in the first hundred steps."""

    def training_step(self, batch):
        self.steps += 1
        field = self.layer(batch).exp().exp().exp() if self.steps < 100 else self.layer(batch)
        return field.mean()


def test_a_step_counts_with_its_own_numbers():
    later = Counts()
    later.steps += 100
    assert planned(later).activations < planned(Counts()).activations


class Refuses(Net):
    """Refuses a loss of 1, which no run has."""

    def checked(self, loss):
        if loss.item() == 1:
            raise ValueError("1 is no loss")
        return loss


def test_a_number_that_the_step_refuses_is_not_the_only_one():
    planned(Refuses())


class Splits(Net):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.seen = loss.item()
        return loss + torch.linalg.eigvals(batch[0, 0]).real.mean()


def test_what_cannot_be_split_is_refused_though_the_step_reads_numbers():
    with pytest.raises(UnsupportedOperationError, match="eigvals"):
        predict(Splits(), FIELDS, 2)


class Searches(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


def test_a_search_that_ends_by_its_numbers_is_measured():
    found = predict(Searches(), FIELDS, 2, "1x2xH100")
    assert found.is_measured
    assert found.sent_for_fields > 2 * planned(Net()).sent_for_fields


class Histogram(Net):
    def training_step(self, batch):
        field = self.layer(batch)
        self.counts = torch.bincount(field.argmax(1).flatten(), minlength=4)
        assert self.counts.shape == (4,)
        return field.square().mean()


@pytest.mark.parametrize("mesh", [1, 2])
def test_counts_of_as_many_kinds_as_are_named(mesh):
    planned(Histogram(), mesh, f"1x{mesh}xH100")


class States(Callback):
    """Adds up what the optimizer holds."""

    def on_train_batch_end(self, trainer, *_):
        held = (x for state in trainer.optimizers[0].state.values() for x in state.values())
        self.size = sum(x.nbytes for x in held)


def bytes_of_states(task):
    run_here(task, found := States())
    return found.size


def test_parameters_that_no_rank_uses_have_no_states():
    task = Task(Net(), None, [copy.deepcopy(FIELDS.dataset[0])], (1, 2))
    assert planned(Net()).memory_by_cause["optimizer"] == on_each_rank(bytes_of_states, task)[0]


class Grows(Net):
    def training_step(self, batch):
        grown = nn.functional.interpolate(self.layer(batch), (29, 8), mode="bilinear")
        return grown.square().mean()


def test_a_plan_of_an_interpolation_knows_which_rows_it_reads():
    """They are kept: a step after the plan reads the same."""
    sent = planned(Grows()).sent_for_fields
    task = Task(Grows(), None, [FIELDS.dataset[0]], (1, 2), simulated=True)
    (loss, _), whole = on_each_rank(loss_of, task), Grows().training_step(FIELDS.dataset[0])
    torch.testing.assert_close(loss, whole.detach())
    assert planned(Grows()).sent_for_fields == sent
    assert sent == 2 * 8 * 4 + 4 * 8 * 4 + 8  # a row of the field, one of the layer's, the sum


class Losses(Callback):
    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.loss = outputs["loss"].detach()


def loss_of(task):
    run_here(task, found := Losses())
    return found.loss
