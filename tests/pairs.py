"""The rows of a product of options that run by default; the other rows are marked slow."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def choose(*factors: Iterable[Any], fast: int | Collection[Any] = 1, every: int = 1) -> list[Any]:
    """The product of some lists of options, as rows for `pytest.mark.parametrize`.

    Args:
        factors: The lists. An option may be a `pytest.param` with marks and an id.
        fast: Which rows run by default. 1: as many as it takes for every option to occur in some
            row. 2: as many as it takes for every pair of options of three lists, the last of which
            is not the longest. A collection: the rows of one list with these options.
        every: Of these rows, the first and then each second (2) or third (3) one runs by default.
    """
    lists = [[*factor] for factor in factors]
    sizes = [len(options) for options in lists]
    if fast == 2:
        assert len(sizes) == 3
        assert sizes[2] <= min(sizes[:2])
    turns = {tuple(turn % size for size in sizes) for turn in range(max(sizes))}
    rows: list[Any] = []
    taken = 0  # the rows so far that run but for `every`
    for places in product(*map(range, sizes)):
        options = [options[i] for i, options in zip(places, lists, strict=True)]
        if isinstance(fast, Collection):
            runs = options[0] in fast
        elif fast == 2:
            runs = sum(places[:2]) % sizes[2] == places[2]
        else:
            runs = places in turns
        rows.append(_row(options, slow=not runs or taken % every > 0))
        taken += runs
    return rows


def _row(options: list[Any], *, slow: bool) -> Any:
    """Join options and their own marks and ids to one row."""
    given = [o if hasattr(o, "marks") else pytest.param(o) for o in options]
    marks = [mark for option in given for mark in option.marks]
    if slow:
        marks.append(pytest.mark.slow)
    named = [option.id or str(option.values[0]) for option in given]
    name = "-".join(named) if any(option.id for option in given) else None
    return pytest.param(*(option.values[0] for option in given), marks=marks, id=name)
