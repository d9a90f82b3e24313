"""All ranks stop a training, or validate within it, after one batch, if one of them would."""

import pytest
import torch.distributed as dist

from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded

HOOKS = {
    "on_fit_start": 0,
    "on_train_start": 0,
    "on_train_epoch_start": 0,
    "on_train_batch_start": 2,
    "training_step": 2,
    "on_before_optimizer_step": 2,
    "on_train_batch_end": 3,
    "on_validation_epoch_end": 2,
    "on_train_epoch_end": 3,
}
DOMAINS = [
    pytest.param((2,), marks=pytest.mark.spmd(2), id="1x2"),
    pytest.param((2,), marks=[pytest.mark.spmd(4), pytest.mark.slow], id="2x2"),
]


class Stops(Featured):
    """Asks for the end in a hook of the first epoch, once it has trained some steps."""

    def __init__(self, hook, *, asks):
        super().__init__()
        self.validations, plain = 0, getattr(self, hook)

        def stop(*args):
            if asks and self.trainer.global_step >= HOOKS[hook]:
                self.trainer.should_stop = True
            return plain(*args)

        setattr(self, hook, stop)

    def on_validation_end(self):
        self.validations += not self.trainer.sanity_checking


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("hook", HOOKS)
def test_one_rank_stops_all(hook, domain):
    last = dist.get_rank() == dist.get_world_size() - 1
    options = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 1}
    options |= {"val_check_interval": 2, "num_sanity_val_steps": 0}
    alone, module = Stops(hook, asks=True), Stops(hook, asks=last)
    expected = fit_alone(alone, **options)
    found = fit_sharded(module, domain, **options)
    assert expected.global_step < 8
    assert (found.global_step, found.current_epoch) == (
        expected.global_step,
        expected.current_epoch,
    )
    assert module.validations == alone.validations
    assert found.should_stop
    assert_same_state(module, alone)


class LooksAtTheClock(Stops):
    """Sees, on one rank, after three steps, that the time for a validation has come."""

    def __init__(self, *, asks):
        super().__init__("on_train_end", asks=False)
        self.asks, self.validated_after = asks, []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.asks and self.trainer.global_step == 3:
            self.trainer._last_val_time = -1e9

    def on_validation_start(self):
        self.validated_after.append(self.trainer.global_step)


@pytest.mark.spmd(2)
def test_a_clock_of_one_rank_begins_a_validation_on_all():
    options = {"val_check_interval": {"hours": 1}, "limit_train_batches": 4}
    options |= {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    alone, module = LooksAtTheClock(asks=True), LooksAtTheClock(asks=dist.get_rank() == 1)
    fit_alone(alone, **options)
    fit_sharded(module, (2,), **options)
    assert alone.validated_after == [3]
    assert module.validated_after == [3]
    assert_same_state(module, alone)
