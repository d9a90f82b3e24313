"""The cases of the families without a stencil: every dim, two dims at once, double backward."""

import pytest

from tests.ops import test_linear, test_pointwise, test_reduce, test_softmax
from tests.parity import assert_double_backward, assert_parity, mesh_of

FAMILIES = [test_linear, test_pointwise, test_reduce, test_softmax]
CASES = {f"{m.__name__[15:]}.{name}": case for m in FAMILIES for name, case in m.CASES.items()}
SMOOTH = [f"{m.__name__[15:]}.{name}" for m in FAMILIES for name in m.SMOOTH]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_three_ranks(case, dim):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[3], [2, 3]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case, dims):
    function, shapes = CASES[case]
    assert_parity(function, shapes, {0: dims}, mesh_of(4) if len(dims) == 1 else mesh_of(2, 2))


@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[3], [2, 3]], ids=str)
@pytest.mark.parametrize("case", SMOOTH)
def test_double_backward(case, dims):
    function, shapes = CASES[case]
    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    assert_double_backward(function, shapes, {0: dims}, mesh)
