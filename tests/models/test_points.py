"""Networks on point clouds: samples and neighbours that distances decide."""

import pytest

from tests.models.check import check

NAMES = ["point_net_plus_plus", "edge_convolution", "transolver", "radius_sum"]


@pytest.mark.slow_rows("point_net_plus_plus")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", NAMES)
def test_three_ranks(name):
    check("handwritten", name, 3)


@pytest.mark.quick_rows("edge_convolution", "radius_sum")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("name", NAMES)
def test_points_over_two_by_two_ranks(name):
    check("handwritten", name, 2, 2)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", ["gino", "gino_weighted"])
def test_operator_between_points_and_a_grid(name):
    """Its fallback for torch_scatter reads the bounds of every neighbourhood one by one."""
    check("neuralop", name, 2)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_operator_over_two_by_two_ranks():
    check("neuralop", "gino_weighted", 2, 2)
