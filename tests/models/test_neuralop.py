"""Neural operators of neuraloperator."""

import copy

import neuralop.models
import pytest
import torch

import lightning_shard
from benchmarks.model_zoo import cases, prepared
from lightning_shard.processes.mesh import make_mesh
from tests.models.check import check
from tests.parity import assert_same


@pytest.mark.slow_rows(
    "fno_1d", "fno_3d", "fno_scaling", "tfno_tt", "tfno_reconstructed", "uno_skip", "codano"
)
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "fno",
        "fno_1d",
        "fno_3d",
        "fno_padded",
        "fno_scaling",
        "fno_max_modes",
        "tfno_tucker",
        "tfno_cp",
        "tfno_tt",
        "tfno_reconstructed",
        "uno",
        "uno_skip",
        "codano",
    ],
)
def test_model(name):
    check("neuralop", name, 2)


@pytest.mark.spmd(2)
@pytest.mark.skipif(
    not hasattr(neuralop.models, "LocalNO"),
    reason="neuraloperator 2.0 has it with torch-harmonics 0.7.4 only",
)
@pytest.mark.parametrize("name", ["local_no", "local_no_differences", "local_no_disco", "sfno"])
def test_local_model(name):
    check("neuralop", name, 2)


@pytest.mark.quick_rows("tfno_cp", "fno_padded")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "name", ["tfno_tucker", "tfno_cp", "tfno_reconstructed", "fno_padded", "fno_3d", "uno"]
)
def test_two_by_two_ranks(name):
    check("neuralop", name, 2, 2)


@pytest.mark.slow_rows("fno_1d", "fno_scaling", "tfno_tt", "uno")
@pytest.mark.spmd(1)
@pytest.mark.parametrize(
    "name",
    ["fno_1d", "fno_3d", "fno_scaling", "fno_max_modes", "tfno_tucker", "tfno_cp", "tfno_tt",
     "tfno_reconstructed", "uno"],
)  # fmt: skip
def test_one_process(name):
    """Prepared for one process, a model transforms only the modes that it keeps."""
    case = cases("neuralop")[name]
    model, inputs = prepared(case.make()), case.tensors()
    fast = copy.deepcopy(model)
    lightning_shard.parallelize(fast, make_mesh("cpu", 1, (1,)))
    expected, found = model(*inputs), fast(*inputs)
    assert_same(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [*model.parameters()])
    for i, gradient in enumerate(torch.autograd.grad(found.square().sum(), [*fast.parameters()])):
        assert_same(gradient, wanted[i], f"gradient {i}")
