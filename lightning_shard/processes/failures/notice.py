"""Entries of the store in which a rank tells the others something for as long as it holds."""

import json
from collections.abc import Sequence
from typing import Any


class Notice:
    """An entry of the store that one rank writes, and that others may read at any time."""

    def __init__(self, key: str) -> None:
        """Begin with nothing to tell."""
        self._key, self._text = key, ""

    def tell(self, store: Any, value: Any) -> None:
        """Write a value of JSON, unless it stands there."""
        if (text := json.dumps(value)) != self._text:
            store.set(self._key, text)
            self._text = text

    def take_back(self, store: Any) -> None:
        """Empty the entry. It is not deleted: a rank that reads just then would wait for it."""
        if self._text:
            store.set(self._key, "")
            self._text = ""


def told_by_all(store: Any, keys: Sequence[str]) -> list[Any]:
    """Return the values of some entries; nothing where one is missing or was taken back."""
    texts = [store.get(key) for key in keys] if store.check([*keys]) else [b""]
    return [json.loads(text) for text in texts] if all(texts) else []
