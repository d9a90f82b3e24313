"""A checkpoint that an exception inside a step leaves: the resumed run makes that step again."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.checkpoint.tiny import Tiny, fit
from tests.pairs import choose
from tests.training import shared_path

FAILS_IN = 4  # of twelve steps, six in an epoch
VALIDATED_AFTER = 6


class StoppedError(Exception):
    """What ends the run, on all ranks."""


class StopsOnce(Tiny):
    """Draws in each step, and is stopped in one, after it has drawn."""

    def __init__(self, stops: str) -> None:
        super().__init__(norm=False)
        self.stops, self.made = stops, 0

    def training_step(self, batch, batch_idx):
        noise = torch.rand(())
        if self.stops == "training" and self.made == FAILS_IN:
            raise StoppedError
        self.made += 1
        return super().training_step(batch, batch_idx) + noise

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.stops == "validation":
            raise StoppedError


def made(stops=""):
    torch.manual_seed(7)
    return StopsOnce(stops)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("domain", "stops"), choose([(1,), (2,)], ["training", "validation"]))
def test_the_step_is_made_again(domain, stops):
    losses, state, _ = fit(domain, module=made())
    folder = shared_path("checkpoints")
    saver = ModelCheckpoint(folder, filename="stopped", save_on_exception=True)
    with pytest.raises(StoppedError):
        fit(domain, saver, module=made(stops), enable_checkpointing=True)
    resumed, resumed_state, _ = fit(domain, module=made(), path=folder / "stopped.ckpt")
    assert resumed == losses[FAILS_IN if stops == "training" else VALIDATED_AFTER :]
    for name, value in state.items():
        assert torch.equal(resumed_state[name], value), name
