from itertools import combinations, product

import pytest

from tests.pairs import by_turns, each_once, pairwise


def rows(params):
    slow = pytest.mark.slow.mark
    kept = [p.values for p in params if slow not in [m.mark for m in p.marks]]
    return kept, [p.values for p in params]


def test_every_pair_of_values_is_in_a_row_that_is_not_slow():
    factors = ["abcde", (1, 2, 3, 4), (True, False)]
    kept, every = rows(pairwise(*factors))
    assert sorted(every) == sorted(product(*factors))
    assert len(kept) == 5 * 4
    for i, j in combinations(range(3), 2):
        assert {(r[i], r[j]) for r in kept} == set(product(factors[i], factors[j]))


def test_every_first_value_is_in_one_row_and_every_second_in_some():
    kept, every = rows(each_once("abcde", (1, 2, 3)))
    assert sorted(every) == sorted(product("abcde", (1, 2, 3)))
    assert [first for first, _ in kept] == [*"abcde"]
    assert {second for _, second in kept} == {1, 2, 3}


def test_every_value_is_in_a_row_that_is_not_slow():
    factors = ["abcde", (1, 2, 3), (True, False)]
    kept, every = rows(by_turns(*factors))
    assert sorted(every) == sorted(product(*factors))
    assert len(kept) == 5
    for i in range(3):
        assert {r[i] for r in kept} == {*factors[i]}


def test_marks_of_a_value_stay():
    two, three = (pytest.param(n, marks=pytest.mark.spmd(n)) for n in (2, 3))
    kept, every = rows(each_once("ab", [two, three]))
    assert kept == [("a", 2), ("b", 3)]
    assert len(every) == 4
    names = [sorted(m.name for m in p.marks) for p in each_once("a", [two, three])]
    assert names == [["spmd"], ["slow", "spmd"]]


def test_names_of_values_stay():
    named = pytest.param(2, id="two")
    assert [p.id for p in each_once("ab", [named])] == ["a-two", "b-two"]
    assert [p.id for p in each_once("ab", [2])] == [None, None]
