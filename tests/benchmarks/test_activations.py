"""The benchmark of activations: what it finds where, on a small network."""

from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import activations


def small() -> nn.Module:
    """Most of what is kept is not a convolution's."""
    tanhs = [nn.Tanh() for _ in range(6)]
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *tanhs) for _ in range(2)]
    return activations.Loss(nn.Sequential(nn.Conv2d(1, 4, 1), *blocks))


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_where_activations_lie():
    case = (small, lambda: torch.randn(1, 1, 96, 96), 2, "Sequential", ["convolution"])
    with mock.patch.dict(activations.CASES, {"small": case}):
        found = activations.counts("small", rounds=1)
    kept, again, selective, moved = (row[:2] for row in found.values())
    assert kept[1] == again[1] == selective[1] == 0
    assert again[0] < selective[0] < kept[0], (again, selective, kept)
    assert moved[0] < kept[0] / 2
    assert moved[1] > kept[0] / 2
