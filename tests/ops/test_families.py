"""The tables of cases (families.py): every dim on three ranks, and two dims at once."""

import pytest

from tests.ops import database
from tests.ops.families import FAMILIES, check, check_second_gradient, first_uses

families = pytest.mark.parametrize("family", FAMILIES)


def over_one_dim(family, cases):
    """By name of a case and each of the given dims; without an index along it, which is refused."""
    return {
        f"{case}, dim {dim}": {"family": family, "case": case, "dims": [dim], "mesh": (3,)}
        for case, dims in cases.items()
        for dim in dims
        if (case, dim) != ("one_hot", 1)
    }


@families
def test_three_ranks(family, run_each):
    """Each function that test_operators.py has not, along dims by turns; the others are slow.

    Three does not divide the extents.
    """
    dims, known = FAMILIES[family].dims, database.functions()
    cases = {case: [dims[i % len(dims)]] for i, case in enumerate(first_uses(family, known))}
    run_each(3, check, over_one_dim(family, cases))


@pytest.mark.slow
@families
def test_every_dim_on_three_ranks(family, run_each):
    run_each(
        3, check, over_one_dim(family, dict.fromkeys(FAMILIES[family].cases, FAMILIES[family].dims))
    )


def over_two_dims(family, cases):
    return {
        case: {"family": family, "case": case, "dims": FAMILIES[family].dims[-2:], "mesh": (2, 2)}
        for case in cases
    }


@families
def test_two_by_two(family, run_each):
    """Every eighth function once; the other cases are slow."""
    run_each(4, check, over_two_dims(family, [*first_uses(family)][::8]))


@pytest.mark.slow
@families
def test_every_case_two_by_two(family, run_each):
    run_each(4, check, over_two_dims(family, FAMILIES[family].cases))


@pytest.mark.slow
@families
def test_four_ranks(family, run_each):
    """More ranks than rows among them."""
    cases = {
        case: {"family": family, "case": case, "dims": FAMILIES[family].dims[-1:], "mesh": (4,)}
        for case in FAMILIES[family].cases
    }
    run_each(4, check, cases)


smooth = pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if f.smooth])


def along_rows(family, cases):
    return {case: {"family": family, "case": case, "dims": [2], "mesh": (3,)} for case in cases}


@smooth
def test_double_backward(family, run_each):
    """Along one dim, every second case: the others are slow here, and in tests/tiles quick."""
    run_each(3, check_second_gradient, along_rows(family, [*FAMILIES[family].smooth][::2]))


@pytest.mark.slow
@smooth
def test_double_backward_of_the_other_cases(family, run_each):
    run_each(3, check_second_gradient, along_rows(family, [*FAMILIES[family].smooth][1::2]))


@pytest.mark.slow
@smooth
def test_double_backward_two_by_two(family, run_each):
    run_each(4, check_second_gradient, over_two_dims(family, FAMILIES[family].smooth))
