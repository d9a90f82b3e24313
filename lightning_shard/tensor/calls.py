"""Counts the functions that are called with split tensors."""

from collections import Counter
from contextvars import ContextVar
from typing import Any

# where calls are counted, by their function; None outside of the steps of a training
counted_calls: ContextVar[Counter[Any] | None] = ContextVar("counted_calls", default=None)
