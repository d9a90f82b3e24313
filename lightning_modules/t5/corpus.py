"""Defines a corpus of summaries: a stream of texts with their summaries, each in one split."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

Split = Literal["train", "val", "test"]

HELD_OUT_OF = 20  # one part in so many is for validation, another one for testing


class Pair(NamedTuple):
    """A text and its summary."""

    source: str
    summary: str


class Corpus(ABC):
    """Gives texts with their summaries. Subclasses read them from a source."""

    @abstractmethod
    def pairs(self) -> Iterator[tuple[Split, Pair]]:
        """Read the pairs, each with its split, always in the same order.

        The reader stops once it has enough.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: Files are not what they should be.
        """


def split_of(key: str) -> Split:
    """Choose the split of a pair by a hash, so that it is the same in every run.

    Args:
        key: A text that related pairs have in common, such as a title: they share a split.

    Returns:
        "val" and "test" for one key in twenty each.
    """
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_OF
    return "val" if number == 0 else "test" if number == 1 else "train"
