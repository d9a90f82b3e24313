"""Training of the Darcy config: one process, two domain ranks, neuraloperator's own Trainer."""

import pytest
import torch

from benchmarks.common import start
from benchmarks.darcy_quality import data_of, neuraloperators, ours

EPOCHS, SAMPLES = 3, 64


@pytest.mark.slow
def test_error_curves_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # data are generated here
    data_of(SAMPLES).prepare_data()  # once, not on every rank
    alone, split = (start(ranks, ours, ranks, EPOCHS, SAMPLES) for ranks in (1, 2))
    assert len(alone) == EPOCHS
    torch.testing.assert_close(split, alone, rtol=1e-4, atol=0)
    assert alone[-1] < 0.85 * alone[0]  # 0.80 of it
    torch.testing.assert_close(neuraloperators(EPOCHS, SAMPLES), alone, rtol=1e-2, atol=0)
