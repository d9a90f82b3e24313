"""What the comparison of models says of a case, without ranks."""

import pytest
import torch
from torch import nn

from benchmarks.model_zoo import Apply, Case
from benchmarks.model_zoo.comparison import rounding


@pytest.mark.parametrize(
    ("dims", "axes", "expected"),
    [((2, 3), 1, [2]), ((2, 3), 2, [2, 3]), ((1,), 2, [1, 1]), ((2, 3), 3, [])],
    ids=str,
)
def test_a_sequence_is_split_by_all_axes(dims, axes, expected):
    assert [*Case(nn.Identity, [(2, 3, 4, 5)], dims).split_by(axes)] == expected


def test_axes_split_the_dims_of_the_first_input_where_inputs_differ():
    assert [*Case(nn.Identity, [(2, 3)], (1,), each=[(0, 0), (1, 1)]).split_by(2)] == [0, 0]


def lost_digits(layer, x):
    """Of numbers near a million what is left below one."""
    return torch.sin(1e6 * layer(x))


def test_rounding_of_a_model_is_what_its_own_sums_leave():
    well = rounding(Case(lambda: nn.Linear(4, 4), [(3, 4)]))
    ill = rounding(Case(lambda: Apply(lost_digits, nn.Linear(4, 4)), [(3, 4)]))
    assert 0 < well < 1e-14
    assert 1e-12 < ill < 1e-7
