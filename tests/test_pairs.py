from itertools import combinations, product

import pytest

from tests.pairs import choose

SLOW = pytest.mark.slow.mark


def rows(params):
    kept = [p.values for p in params if SLOW not in [m.mark for m in p.marks]]
    return kept, [p.values for p in params]


def test_every_pair_of_values_is_in_a_row_that_is_not_slow():
    factors = ["abcde", (1, 2, 3, 4), (True, False)]
    kept, every = rows(choose(*factors, fast=2))
    assert sorted(every) == sorted(product(*factors))
    assert len(kept) == 5 * 4
    for i, j in combinations(range(3), 2):
        assert {(r[i], r[j]) for r in kept} == set(product(factors[i], factors[j]))


@pytest.mark.parametrize("factors", [["abcde", (1, 2, 3)], ["ab", (1, 2, 3), (True, False)]])
def test_every_value_is_in_a_row_that_is_not_slow(factors):
    kept, every = rows(choose(*factors))
    assert sorted(every) == sorted(product(*factors))
    assert len(kept) == max(map(len, factors))
    for i, factor in enumerate(factors):
        assert {r[i] for r in kept} == {*factor}


def test_values_that_are_named_are_not_slow():
    assert rows(choose("abc", fast="ac"))[0] == [("a",), ("c",)]
    assert rows(choose([{}, {"more": True}], fast=[{}]))[0] == [({},)]


def test_every_second_of_the_rows_is_not_slow():
    assert rows(choose("abcde", every=2))[0] == [("a",), ("c",), ("e",)]
    assert rows(choose("abc", (1, 2), every=2))[0] == [("a", 1), ("c", 1)]
    assert len(rows(choose("abc", (1, 2), every=2))[1]) == 6


def test_marks_of_a_value_stay():
    two, three = (pytest.param(n, marks=pytest.mark.spmd(n)) for n in (2, 3))
    kept, every = rows(choose("ab", [two, three]))
    assert kept == [("a", 2), ("b", 3)]
    assert len(every) == 4
    names = [sorted(m.name for m in p.marks) for p in choose("ab", [two, three])[:2]]
    assert names == [["spmd"], ["slow", "spmd"]]


def test_names_of_values_stay():
    named = pytest.param(2, id="two")
    assert [p.id for p in choose("ab", [named])] == ["a-two", "b-two"]
    assert [p.id for p in choose("ab", [2])] == [None, None]
