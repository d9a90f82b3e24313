"""Neural operators of neuraloperator."""

import neuralop.models
import pytest

from tests.models.check import check


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


@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", ["tfno_tucker", "fno_padded"])
def test_two_by_two_ranks(name):
    check("neuralop", name, 2, 2)
