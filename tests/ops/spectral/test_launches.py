"""What one spectral layer asks of device and host, on one rank, beside neuraloperator's."""

import copy
import tracemalloc
from functools import partial

import pytest
import torch
from neuralop.layers.spectral_convolution import SpectralConv

import lightning_shard
from benchmarks.gpu_speed import Launches
from lightning_shard.domain.cache import CONSTANTS
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from tests.parity import mesh_of


def step(layer, field):
    layer(field).square().mean().backward()


def both(*extents, modes):
    """A step of neuraloperator's layer, and one of ours, after one of each."""
    layer = SpectralConv(4, 4, (modes,) * len(extents), bias=False)
    ours = copy.deepcopy(layer)
    avoid_whole_fields(ours)
    local = torch.randn(1, 4, *extents, requires_grad=True)
    split = lightning_shard.from_local(local, mesh_of(1), 2, local.shape)
    steps = partial(step, layer, local), partial(step, ours, split)
    for each in (*steps, *steps):
        each()
    return steps


@pytest.mark.spmd(1)
@pytest.mark.parametrize(
    ("extents", "modes"), [((64,), 16), ((64, 64), 16), ((16, 16, 16), 8), ((45, 21), 8)]
)
def test_no_more_kernels_than_neuraloperator(extents, modes):
    counts = []
    for each in both(*extents, modes=modes):
        with Launches() as launches:
            each()
        counts.append(launches.seen)
    plain, ours = counts
    assert ours.total() <= plain.total(), (plain, ours)
    assert not {"allreduce_", "copy_", "set_"} & set(ours)


@pytest.mark.spmd(1)
def test_the_host_does_not_list_the_points_of_a_field():
    """The frequencies of a whole dim are a range: a list of them takes the time of many kernels."""
    _, ours = both(2**19, modes=16)
    tracemalloc.start()
    ours()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18  # bytes; a list of 2^18 frequencies holds more than 2^21


@pytest.mark.spmd(1)
def test_tables_are_made_once():
    _, ours = both(64, 32, modes=8)
    kept = len(CONSTANTS)
    with Launches() as launches:
        ours()
    assert len(CONSTANTS) == kept
    assert not {"polar", "arange"} & set(launches.seen)
