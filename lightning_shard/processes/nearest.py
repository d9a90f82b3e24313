"""Ends the sentence on an unknown name with the valid name that is nearest."""

import difflib
from collections.abc import Iterable

SHORT_LIST = 12


def nearest(name: str, choices: Iterable[str], label: str = "accepted here:") -> str:
    """End a sentence with the nearest valid name, or with the choices when they are few."""
    by_lower = {choice.lower(): choice for choice in choices}
    if close := difflib.get_close_matches(name.lower(), by_lower, 1):
        return f"; did you mean '{by_lower[close[0]]}'?"
    few = 0 < len(by_lower) <= SHORT_LIST and label
    return f"; {label} {', '.join(sorted(by_lower.values()))}" if few else ""
