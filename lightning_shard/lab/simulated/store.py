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


class SimulatedStore(_AnyStore):
    """The view that one simulated rank has of the store of all.

    Attributes:
        values: What all ranks have written, by name.
        rank: The rank whose view it is.
    """

    def __init__(self, values: dict[str, bytes], rank: int, turns: Turns) -> None:
        super().__init__()
        self.values, self.rank, self._turns = values, rank, turns

    # the names are torch's

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        if amount == 0:  # a look at what others add
            self._let_others_run()
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        if not self._has(keys):
            self._let_others_run()
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        what = f"{', '.join(keys)} in the store"
        if not self._has(keys):
            self._turns.wait(self.rank, lambda: self._has(keys), what)

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self.values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
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
        name, _, last = key.rpartition("/")
        if last == "verdict":  # of processes/agreement.py: no difference was found
            return json.dumps(["", dist.get_world_size()]).encode()
        return self.values.get(key, self.values.get(f"{name}/{dist.get_rank()}", b""))

    def check(self, keys: Sequence[str]) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        pass
