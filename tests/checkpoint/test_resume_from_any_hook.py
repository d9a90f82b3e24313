"""A run that was saved before the first batch of an epoch, or in a validation, goes on alike."""

from functools import partial

import pytest
from lightning.pytorch import Callback

from tests.checkpoint.test_resume_after_a_step import assert_rest_is_alike
from tests.pairs import choose
from tests.training import shared_path

BEFORE_BATCHES = [
    ("on_train_start", 1),
    ("on_train_epoch_start", 1),
    ("on_train_epoch_start", 2),
    ("on_train_batch_start", 1),
    ("on_train_batch_start", 6),  # the first of the second epoch
]
IN_VALIDATION = [
    ("on_validation_start", 2),
    ("on_validation_batch_start", 2),
    ("on_validation_batch_end", 1),
    ("on_validation_batch_end", 4),  # the last of a validation
    ("on_validation_epoch_end", 3),
]


class SaveIn(Callback):
    """Saves at the n-th call of a hook; `seen` is what the module noted before what is repeated."""

    def __init__(self, hook, count, path):
        self.left, self.path, self.seen = count, path, 0
        setattr(self, hook, partial(self._save, hook))

    def _save(self, hook, trainer, module, *args):
        self.left -= 1
        if not self.left:
            self.seen = len(module.noted)
            if "validation" in hook:  # it is run again from its first batch
                events = [event[0] for event in module.noted]
                while events and events[-1] == "validation":
                    events.pop()
                self.seen = len(events)
            trainer.save_checkpoint(self.path)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "case",
    choose(
        [(d, *at) for d in [(2,), (1,)] for at in BEFORE_BATCHES + IN_VALIDATION],
        fast=[((2,), *at) for at in (BEFORE_BATCHES[0], IN_VALIDATION[-1])],
    ),
    ids=str,
)
def test_goes_on(case):
    assert_goes_on(*case)


def assert_goes_on(domain, hook, count, **options):
    save = SaveIn(hook, count, shared_path("hook.ckpt"))
    noted = assert_rest_is_alike(save, domain, 2, **options)
    assert save.seen < len(noted)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("steps", "loader"), choose([-1, 12, 100], ["shuffled", "own", "own numbers"], every=2)
)
def test_goes_on_after_an_epoch(steps, loader):
    """With `max_steps` Lightning takes the epoch for one that goes on, and leaves one out."""
    save = SaveIn("on_train_epoch_end", 1, shared_path("hook.ckpt"))
    noted = assert_rest_is_alike(save, (2,), 2, done=1, max_steps=steps, loader=loader)
    assert noted[save.seen][0] == "epoch"  # of the module, after the callback


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "case",
    choose(
        [(d, *at) for d in [(2,), (1,)] for at in BEFORE_BATCHES + IN_VALIDATION],
        fast=[((1,), "on_validation_batch_start", 2)],
    ),
    ids=str,
)
def test_a_generator_of_the_user_goes_on(case):
    """It was given to the loader, and draws the order of the next epochs."""
    assert_goes_on(*case, loader="own numbers")
