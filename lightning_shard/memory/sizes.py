"""Reads sizes of memory as they are written in a config, and writes them."""

import re


def bytes_of(size: str, name: str) -> int:
    """Return the bytes of a size such as "8GB", "1.5 GiB" or "0".

    Raises:
        ValueError: It is no size; the message calls it by `name`.
    """
    written = size if isinstance(size, str) else ""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", written, re.IGNORECASE)
    if found is None:
        raise ValueError(f'{name} must be a size such as "8GB" or "500MiB"; got {size!r}.')
    number, unit, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " kmgt".index(unit.lower() or " "))


def size_in_words(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
