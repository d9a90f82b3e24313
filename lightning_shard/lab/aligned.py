"""Tables as lines of text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Give the rows as lines, whose columns are two spaces apart.

    Args:
        rows: The head first.
        numbers: True if all columns but the first are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
