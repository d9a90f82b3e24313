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


@pytest.mark.spmd(2)
def test_shards_save_foreach_as_it_was_asked_for():
    path = shared_path("some.ckpt")
    module = Optimized(lambda p: torch.optim.Adam(p, foreach=True))
    with pytest.warns(UserWarning, match="one by one") as told:
        fit((2,), SaveAt(path, 4), module=module, sharding="full")
    assert sum("one by one" in str(each.message) for each in told) == 1
    (saved,) = torch.load(path, weights_only=False)["optimizer_states"]
    assert saved["param_groups"][0]["foreach"] is True
