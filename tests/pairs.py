"""Combinations of options that stand for their product, which is slow."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def pairwise(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]) -> list[Any]:
    """The product of three; those without which every pair of values still occurs are slow."""
    firsts, seconds, thirds = [*first], [*second], [*third]
    assert len(thirds) <= min(len(firsts), len(seconds))
    return [
        _row([a, b, c], slow=(i + j) % len(thirds) != k)
        for (i, a), (j, b), (k, c) in product(*map(enumerate, (firsts, seconds, thirds)))
    ]


def few(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Those values, of which only the fast ones run by default."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


def each_once(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """The product of two; slow are all but one for each value of the first, by turns."""
    seconds = [*second]
    return [
        _row([a, b], slow=i % len(seconds) != j)
        for (i, a), (j, b) in product(enumerate(first), enumerate(seconds))
    ]


def by_turns(first: Iterable[Any], second: Iterable[Any], third: Iterable[Any]) -> list[Any]:
    """The product of three; slow are all but as many as it takes that every value occurs."""
    firsts, seconds, thirds = [*first], [*second], [*third]
    turns = max(map(len, (firsts, seconds, thirds)))
    seen = {(t % len(firsts), t % len(seconds), t % len(thirds)) for t in range(turns)}
    return [
        _row([a, b, c], slow=(i, j, k) not in seen)
        for (i, a), (j, b), (k, c) in product(*map(enumerate, (firsts, seconds, thirds)))
    ]


def _row(values: list[Any], *, slow: bool) -> Any:
    """Of values and of parameters that have marks of their own."""
    given = [v if hasattr(v, "marks") else pytest.param(v) for v in values]
    marks = [mark for value in given for mark in value.marks]
    if slow:
        marks.append(pytest.mark.slow)
    named = [value.id or str(value.values[0]) for value in given]
    name = "-".join(named) if any(value.id for value in given) else None
    return pytest.param(*(value.values[0] for value in given), marks=marks, id=name)
