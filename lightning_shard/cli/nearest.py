"""The nearest valid name to one that was mistyped."""

import difflib
from collections.abc import Callable, Iterable

SHORT_LIST = 12


def nearest(
    name: str,
    choices: Iterable[str],
    label: str = "accepted here:",
    quote: Callable[[str], str] = str,
) -> str:
    """The end of a sentence: the nearest valid name, or the choices when they are few.

    Args:
        name: What was typed.
        choices: The valid names.
        label: What stands before the list of choices.
        quote: How the nearest name is shown, for example as a path.
    """
    names = sorted(set(choices))
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), lower, 1, 0.6)
    if close:
        return f"; did you mean '{quote(lower[close[0]])}'?"
    if names and len(names) <= SHORT_LIST:
        return f"; {label} {', '.join(names)}"
    return ""
