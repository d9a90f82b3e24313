"""The tables of cases (families.py): every dim on three ranks, and two dims at once."""

import pytest

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
    """Of extents that three does not divide, and dims by turns: the others are slow."""
    dims = FAMILIES[family].dims
    cases = {case: [dims[i % len(dims)]] for i, case in enumerate(FAMILIES[family].cases)}
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
    """Every second function once; the other cases are slow."""
    run_each(4, check, over_two_dims(family, [*first_uses(family)][::2]))


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


@smooth
def test_double_backward(family, run_each):
    """Along one dim; test_operators.py has it of every function of torch's database."""
    cases = {
        case: {"family": family, "case": case, "dims": [2], "mesh": (3,)}
        for case in FAMILIES[family].smooth
    }
    run_each(3, check_second_gradient, cases)


@pytest.mark.slow
@smooth
def test_double_backward_two_by_two(family, run_each):
    run_each(4, check_second_gradient, over_two_dims(family, FAMILIES[family].smooth))
