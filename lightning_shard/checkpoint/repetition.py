"""Refuses files whose values repeat each other so often that to read them takes all time or memory.

A pickle may hold one list ten times, and that list another one ten times: after twenty levels a
kilobyte stands for more values than a machine has memory. It may also hold a list that contains
itself.
"""

from typing import Any

from lightning_shard.checkpoint.errors import DamagedError
from lightning_shard.processes.typed import is_dict

LEVELS = 200
REPEATED = 100  # times as many values as there are in the file; so much is never an accident
FEW = 2**20  # values that take no time
_CONTAINERS = (list, tuple, set, frozenset)


def refuse_repetition(value: Any, origin: str) -> None:
    """Look through nested containers, each of them once.

    Args:
        value: What was read.
        origin: The file, for the message.

    Raises:
        DamagedError: It has too many levels, or more values than it could mean to hold.
    """
    sizes: dict[int, int] = {}  # values in a container, counted as often as they are repeated
    single = 0  # values in the file

    def size(value: Any, level: int) -> int:
        nonlocal single
        if is_dict(value):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            inner = value
        else:
            return 1
        if id(value) not in sizes:
            if level > LEVELS:
                raise DamagedError(f"'{origin}' holds values of more than {LEVELS} levels.")
            single += len(inner)
            sizes[id(value)] = 1 + sum([size(v, level + 1) for v in inner])
        return sizes[id(value)]

    repeated = size(value, 0)
    if repeated > max(FEW, REPEATED * single):
        raise DamagedError(
            f"'{origin}' repeats its {single:,} values so often that they are {repeated:.0e}; no "
            "checkpoint does."
        )
