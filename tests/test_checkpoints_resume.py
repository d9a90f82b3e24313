"""A run that stops and resumes equals the uninterrupted one."""

import pytest
import torch

from tests.tiny import SaveAt, fit, tiny
from tests.training import shared_path


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("at", "step"), [("batch", 4), ("epoch", 6), ("batch", 9)])
@pytest.mark.parametrize(
    ("domain", "options"),
    [
        ((2,), {}),
        ((1,), {"checkpoint_format": "sharded"}),
        ((2,), {"checkpoint_format": "sharded", "async_checkpoint": True}),
    ],
    ids=["2x2-file", "4x1-directory", "2x2-asynchronous"],
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


def test_bit_equal_in_one_process(tmp_path):
    losses, state, _ = fit((1,), SaveAt(tmp_path / "some.ckpt", 4))
    torch.rand(3)
    resumed, resumed_state, _ = fit((1,), path=tmp_path / "some.ckpt")
    assert resumed == losses[4:]
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())


@pytest.mark.spmd(2)
def test_several_optimizers():
    path = shared_path("some.ckpt")
    losses, state, _ = fit((2,), SaveAt(path, 8), module=tiny(optimizers=2))
    resumed, resumed_state, _ = fit((2,), module=tiny(optimizers=2), path=path)
    assert resumed == losses[4:]  # two optimizers: two global steps a batch
    assert all(torch.equal(resumed_state[name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="holds 2 optimizers; configure_optimizers returned 1"):
        fit((2,), module=tiny(), path=path)
