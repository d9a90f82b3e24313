"""Hides advice of Lightning where it does not hold."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def hidden(words: str) -> Generator[None]:
    """Show no warning that matches these words, from now on until the end, whoever else filters."""
    warnings.filterwarnings("ignore", words)
    added, filters = warnings.filters[0], warnings.filters
    try:
        yield
    finally:
        kept: Any = filters
        if added in kept:
            kept.remove(added)
