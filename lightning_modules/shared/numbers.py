"""Refuses numbers that are too small, by the name of the argument."""

from collections.abc import Sequence


def at_least(least: float, **arguments: float | Sequence[float] | None) -> None:
    """Compare arguments, or each number of those that are lists, with the least that has a meaning.

    Args:
        least: The smallest number that is allowed.
        arguments: By name; None is allowed.

    Raises:
        ValueError: One is smaller.
    """
    for name, value in arguments.items():
        numbers = value if isinstance(value, Sequence) else [] if value is None else [value]
        if any(number < least for number in numbers):
            raise ValueError(f"{name} must be {least} or more; got {value}.")
