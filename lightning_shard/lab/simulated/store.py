"""Gives simulated ranks the store in which the ranks of a process group meet.

A look for a value that is not there lets the other ranks run. So code that polls a store works
among simulated ranks as it does among processes.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_shard.lab.simulated.turns import Turns

# torch documents it, but not how to subclass it
_AnyStore: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]


class Values(dict[str, bytes]):
    """Values that ranks have written, by name."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value."""
        self[key] = value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        self[key] = str(int(self.get(key, b"0")) + amount).encode()
        return int(self[key])

    def drop(self, key: str) -> bool:
        """Delete a value; return True if it was there."""
        return self.pop(key, None) is not None


class SimulatedStore(_AnyStore):
    """The view that one simulated rank has of the store of all.

    Attributes:
        values: Values that all ranks have written, by name.
        rank: The number of the rank among those that take turns.
    """

    def __init__(self, values: Values, rank: int, turns: Turns) -> None:
        super().__init__()
        self.values, self.rank, self._turns = values, rank, turns

    # the names are torch's

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self.values.put(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Return a value, once it is written."""
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum; 0 reads it."""
        if amount == 0:  # a look at what others add
            self._let_others_run()
            return int(self.values.get(key, b"0"))
        return self.values.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are written; let other ranks run before it returns False."""
        if not self._has(keys):
            self._let_others_run()
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Let other ranks run until all keys are written."""
        what = f"{', '.join(keys)} in the store"
        if not self._has(keys):
            self._turns.wait(self.rank, lambda: self._has(keys), what)

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Delete a key; return True if it was there."""
        return self.values.drop(key)

    def getNumKeys(self) -> int:  # noqa: N802
        """Count the keys."""
        return len(self.values)

    delete_key, num_keys = deleteKey, getNumKeys

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def _let_others_run(self) -> None:
        if self._turns.is_thread_of(self.rank):  # a helper thread has no turn to give
            self._turns.give_way(self.rank)


class LoneStore(SimulatedStore):
    """The store of a rank that runs alone: the others have written what it would write."""

    def get(self, key: str) -> bytes:
        """Return a value as if all ranks had written what this one has."""
        name, _, last = key.rpartition("/")
        if last == "verdict":  # processes/agreement.py has found no difference
            return json.dumps(["", dist.get_world_size()]).encode()
        return self.values.get(key, self.values.get(f"{name}/{dist.get_rank()}", b""))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True: no other rank is waited for."""
        return True

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return at once: there is no other rank."""
