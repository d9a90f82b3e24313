"""A run that stops and resumes equals the uninterrupted one."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.tiny import SaveAt, fit, tiny
from tests.pairs import choose
from tests.training import shared_path

FILE: dict[str, Any] = {}
DIRECTORY = {"checkpoint_format": "sharded"}
LATER = {"checkpoint_format": "async"}
# in the middle of an epoch, at the end of one, in a later one
CASES = {
    "2x2-file-4": ((2,), FILE, "batch", 4),
    "1x4-directory-9": ((4,), DIRECTORY, "batch", 9),
    "2x2-later-6": ((2,), LATER, "epoch", 6),
}
SLOW = {
    f"{name}-{step}": (domain, options, at, step)
    for name, domain, options in (("2x2-file", (2,), FILE), ("4x1-directory", (1,), DIRECTORY))
    for at, step in (("batch", 4), ("epoch", 6), ("batch", 9))
} | {"4x1-file-6": ((1,), FILE, "epoch", 6)}


@pytest.mark.quick_rows("2x2-later-6")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("domain", "options", "at", "step"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in SLOW.items()
            if name not in CASES
        ),
    ],
)
def test_bit_equal_with_dropout(domain, options, at, step):
    path = shared_path("some.ckpt")
    losses, state, _ = fit(domain, SaveAt(path, step, at), **options)
    assert path.is_dir() == bool(options)
    torch.rand(3)  # what happened in between must not matter
    resumed, resumed_state, _ = fit(domain, path=path)
    assert resumed == losses[step:]
    for name, value in state.items():
        assert torch.equal(resumed_state[name], value), name


@pytest.mark.quick_rows("0-saved0")
@pytest.mark.parametrize(("workers", "saved"), choose([0, 1], [("epoch", 6), ("batch", 4)]))
def test_bit_equal_in_one_process(workers, saved, tmp_path):
    """A worker asks for the samples that come next, before anything else has resumed."""
    with mock.patch("tests.checkpoint.tiny.DataLoader", partial(DataLoader, num_workers=workers)):
        at, step = saved
        losses, state, _ = fit((1,), SaveAt(tmp_path / "some.ckpt", step, at))
        torch.rand(3)
        resumed, resumed_state, _ = fit((1,), path=tmp_path / "some.ckpt")
    assert resumed == losses[step:]
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_several_optimizers():
    path = shared_path("some.ckpt")
    losses, state, _ = fit((2,), SaveAt(path, 8), module=tiny(optimizers=2))
    resumed, resumed_state, _ = fit((2,), module=tiny(optimizers=2), path=path)
    assert resumed == losses[4:]  # two optimizers: two global steps a batch
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="holds 2 optimizers; configure_optimizers returned 1"):
        fit((2,), module=tiny(), path=path)


@pytest.mark.quick_rows("6-True")
@pytest.mark.parametrize(("step", "warns"), [(6, True), (12, False)])
def test_a_resumed_run_says_that_it_reloads_in_other_epochs(step, warns, tmp_path, recwarn):
    """Lightning counts from the epoch of the resume: the first or the second."""
    path = tmp_path / "some.ckpt"
    reloads = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}
    fit((1,), SaveAt(path, step, "epoch"), **reloads)
    assert not [w for w in recwarn if "from the epoch in which" in str(w.message)]
    fit((1,), path=path, **reloads)
    assert bool([w for w in recwarn if "from the epoch in which" in str(w.message)]) == warns
