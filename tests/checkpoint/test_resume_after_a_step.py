"""A run that was saved as a step ended does what was still due: validation, the epoch's end."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from tests.pairs import choose
from tests.training import Fields, generator, shared_path, trainer

BATCHES = 5


def sample(index):
    return torch.randn(1, 7, 5, generator=generator(index), dtype=torch.float64)


class Noted(LightningModule):
    """Notes what it sees; its rate follows a value."""

    def __init__(self, monitor, interval, estimates):
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        self.monitor, self.interval, self.estimates = monitor, interval, estimates
        self.noted = []

    def training_step(self, x, batch_idx):
        x = sum(x.values()) if isinstance(x, dict) else x
        self.noted.append(("train", float(x.mean())))
        loss = (self.network(x) - x.mean((1, 2, 3), True)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        mean = float(self.trainer.callback_metrics["loss_epoch"])
        self.noted.append(("epoch", self.optimizers().param_groups[0]["lr"], mean))

    def validation_step(self, x, batch_idx):
        self.noted.append(("validation", float(x.mean())))
        self.log("v", self.network(x).mean().abs(), sync_dist=True)

    def on_validation_end(self):
        self.noted.append(("read", float(self.trainer.callback_metrics["loss_step"])))

    def configure_optimizers(self):
        if self.estimates:
            assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.2
        )
        plan = {"scheduler": scheduler, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": plan | {"strict": False}}


class SaveAt(Callback):
    def __init__(self, step, path):
        self.step, self.path, self.seen = step, path, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.seen = len(module.noted)


class Stateful:
    """A loader that goes on where its state says."""

    def __init__(self, samples):
        self.samples, self.at = samples, 0

    def __len__(self):
        return self.samples

    def __iter__(self):
        begun, self.at = self.at, 0
        for index in range(begun, self.samples):
            self.at = (index + 1) % self.samples
            yield sample(index)[None]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def run(
    domain, save, every, follows=("v", "step"), path=None, loader="shuffled", validated=4, **options
):
    seed_everything(5)
    module = Noted(*follows, estimates=loader == "own")
    replicas = dist.get_world_size() // domain[0]
    batch_size = 2 // replicas
    validation = DataLoader(Fields(sample, validated), batch_size) if every else None
    training = DataLoader(Fields(sample, 2 * BATCHES), batch_size, shuffle=True)
    if loader == "own numbers":
        numbers = torch.Generator().manual_seed(11)
        training = DataLoader(training.dataset, batch_size, shuffle=True, generator=numbers)
    if loader == "two":
        training = {"a": training, "b": DataLoader(Fields(sample, 10), batch_size, shuffle=True)}
    runner = trainer(
        domain,
        callbacks=save if isinstance(save, list) else [save],
        max_epochs=3,
        num_sanity_val_steps=0,
        val_check_interval=every or 1.0,
        **options,
    )
    training = Stateful(BATCHES) if loader == "own" else training
    runner.fit(module, training, validation, ckpt_path=path)
    numbers = {key: float(value) for key, value in runner.callback_metrics.items()}
    return module.noted, full_module_state(module), numbers


def assert_goes_on(domain, step, every, **options):
    assert_rest_is_alike(SaveAt(step, shared_path("step.ckpt")), domain, every, **options)


def assert_rest_is_alike(save, domain, every, done=0, **options):
    """What the run notes from which `save` has saved; `done` events after it are not repeated."""
    noted, state, numbers = run(domain, save, every, **options)
    again, resumed_state, resumed_numbers = run(
        domain, Callback(), every, path=save.path, **options
    )
    assert again == noted[save.seen + done :]
    assert resumed_numbers == numbers
    for key, value in state.items():
        assert torch.equal(resumed_state[key], value), key
    return noted


@pytest.mark.quick_rows("('v', 'step')-((2,), 2, 2)", "('loss_epoch', 'epoch')-((1,), 5, 1.0)")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "case",
    choose(
        [*product([(2,), (1,)], [2, 3, 5, 7], [2, 1.0, 0])],
        fast=[((2,), 2, 2), ((1,), 5, 1.0)],
    ),
    ids=str,
)
@pytest.mark.parametrize("follows", [("v", "step"), ("loss_epoch", "epoch")], ids=str)
def test_the_rest_of_a_step(case, follows):
    assert_goes_on(*case, follows=follows)


@pytest.mark.spmd(2)
def test_a_loader_with_a_state_that_was_made_before_it_was_read():
    assert_goes_on((2,), 3, 2, loader="own")


@pytest.mark.quick_rows("(1,)")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(2,), (1,)], ids=str)
def test_two_loaders(domain):
    assert_goes_on(domain, 3, 2, loader="two")


@pytest.mark.spmd(2)
@pytest.mark.quick_rows("own numbers-(1,)-3")
@pytest.mark.parametrize("step", [3, BATCHES, 2 * BATCHES])
@pytest.mark.parametrize("domain", [(2,), (1,)], ids=str)
@pytest.mark.parametrize("loader", ["shuffled", "own numbers"])
def test_loaders_that_are_made_anew_in_each_epoch(loader, domain, step):
    every = 2 if step < BATCHES else BATCHES
    assert_goes_on(domain, step, every, loader=loader, reload_dataloaders_every_n_epochs=1)


@pytest.mark.quick_rows("((2,), (1,))")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domains", [((2,), (1,)), ((1,), (2,))], ids=str)
def test_means_of_an_epoch_on_another_mesh(domains):
    path = shared_path("step.ckpt")
    noted, *_ = run(domains[0], SaveAt(3, path), 2)
    again, *_ = run(domains[1], SaveAt(0, path), 2, path=path)
    expected, found = ([e[1:] for e in events if e[0] == "epoch"] for events in (noted, again))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)
