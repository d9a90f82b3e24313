"""The tables of cases (tests/ops/families.py) in tiles of one process, as over ranks."""

import pytest

from tests.ops.families import FAMILIES, check, check_second_gradient, first_uses
from tests.parity import tiles_of

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
families = pytest.mark.parametrize("family", FAMILIES)
smooth = pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.smooth])


@families
def test_three_tiles(family, subtests):
    dims = FAMILIES[family].dims
    for i, case in enumerate(FAMILIES[family].cases):
        dim = dims[i % len(dims)]
        if (case, dim) != ("one_hot", 1):
            with subtests.test(case, dim=dim):
                check(family, case, [dim], (3,), tiles_of)


@pytest.mark.slow_rows("lookup", "select", "mask", "pointwise", "sums", "loss_of_split_targets")
@families
def test_two_by_two(family, subtests):
    for case in first_uses(family):
        with subtests.test(case):
            check(family, case, FAMILIES[family].dims[-2:], (2, 2), tiles_of)


@pytest.mark.slow_rows("lookup", "mask", "loss_of_split_targets", "pointwise", "linear", "select")
@families
def test_more_tiles_than_rows(family, subtests):
    for case in first_uses(family):
        with subtests.test(case):
            check(family, case, FAMILIES[family].dims[-1:], (9,), tiles_of)


@smooth
def test_second_gradients(family, subtests):
    for case in FAMILIES[family].smooth:
        with subtests.test(case):
            check_second_gradient(family, case, [2], (3,), tiles_of)
