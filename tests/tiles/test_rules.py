"""The tables of cases (tests/ops/families.py) in tiles of one process, as over ranks."""

import pytest

from tests.ops.families import FAMILIES, check, check_second_gradient, first_uses
from tests.parity import tiles_of

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
families = pytest.mark.parametrize("family", FAMILIES)
smooth = pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.smooth])


def check_by_turns(family, cases, subtests):
    """Each case along one dim."""
    dims = FAMILIES[family].dims
    for i, case in enumerate(cases):
        dim = dims[i % len(dims)]
        if (case, dim) != ("one_hot", 1):
            with subtests.test(case, dim=dim):
                check(family, case, [dim], (3,), tiles_of)


@families
def test_three_tiles(family, subtests):
    """Every sixth case; the others are slow."""
    check_by_turns(family, [*FAMILIES[family].cases][::6], subtests)


@pytest.mark.slow
@families
def test_every_case_in_three_tiles(family, subtests):
    check_by_turns(family, FAMILIES[family].cases, subtests)


@pytest.mark.slow_rows(
    "linear", "lookup", "loss", "loss_of_split_targets", "mask", "pointwise", "select", "sums"
)
@families
def test_two_by_two(family, subtests):
    for case in first_uses(family):
        with subtests.test(case):
            check(family, case, FAMILIES[family].dims[-2:], (2, 2), tiles_of)


@pytest.mark.slow_rows(
    "lookup",
    "mask",
    "loss",
    "loss_of_split_targets",
    "pointwise",
    "linear",
    "pool",
    "select",
    "sums",
)
@families
def test_more_tiles_than_rows(family, subtests):
    for case in first_uses(family):
        with subtests.test(case):
            check(family, case, FAMILIES[family].dims[-1:], (9,), tiles_of)


def check_second_gradients(family, cases, subtests):
    for case in cases:
        with subtests.test(case):
            check_second_gradient(family, case, [2], (3,), tiles_of)


@smooth
def test_second_gradients(family, subtests):
    """Those cases that are slow on ranks (tests/ops/test_families.py); the others are slow here."""
    check_second_gradients(family, [*FAMILIES[family].smooth][1::2], subtests)


@pytest.mark.slow
@smooth
def test_second_gradients_of_the_other_cases(family, subtests):
    check_second_gradients(family, [*FAMILIES[family].smooth][::2], subtests)
