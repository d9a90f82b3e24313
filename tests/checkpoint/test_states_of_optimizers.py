"""Optimizers and schedulers go on as they were saved."""

import pytest
import torch

from tests.checkpoint.tiny import SaveAt, Tiny, fit
from tests.training import shared_path

OPTIMIZERS = {
    "lists in the state": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "a tensor in a group": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


class Optimized(Tiny):
    """Trained by a given optimizer."""

    def __init__(self, make, **options):
        torch.manual_seed(7)
        super().__init__(norm=False, **options)
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.quick_rows("sharded-a tensor in a group")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("form", ["single", "sharded"])
def test_a_run_goes_on_bit_for_bit(name, form):
    path = shared_path("some.ckpt")
    made = (Optimized(OPTIMIZERS[name]) for _ in range(2))
    losses, state, _ = fit((2,), SaveAt(path, 4), module=next(made), checkpoint_format=form)
    resumed, resumed_state, _ = fit((2,), path=path, module=next(made))
    assert resumed == losses[4:]
    assert all(torch.equal(resumed_state[key], value) for key, value in state.items())


class Halved(Tiny):
    """Its rate halves as an epoch ends whose last loss is below that of the epoch before."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5, threshold=1e9, threshold_mode="abs"
        )
        plan = {"scheduler": scheduler, "monitor": "loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


@pytest.mark.spmd(2)
def test_a_plateau_counts_the_epoch_at_whose_end_the_run_was_saved():
    path = shared_path("epoch.ckpt")
    torch.manual_seed(7)
    losses, *_ = fit((2,), SaveAt(path, 12, "epoch"), module=Halved(), max_epochs=4)
    torch.manual_seed(7)
    resumed, *_ = fit((2,), path=path, module=Halved(), max_epochs=4)
    assert resumed == losses[12:]


@pytest.mark.spmd(2)
def test_shards_save_foreach_as_it_was_asked_for():
    path = shared_path("some.ckpt")
    module = Optimized(lambda p: torch.optim.Adam(p, foreach=True))
    with pytest.warns(UserWarning, match="one by one") as told:
        fit((2,), SaveAt(path, 4), module=module, sharding="full")
    assert sum("one by one" in str(each.message) for each in told) == 1
    (saved,) = torch.load(path, weights_only=False)["optimizer_states"]
    assert saved["param_groups"][0]["foreach"] is True
