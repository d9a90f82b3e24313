"""Arrays of a Zarr group that the first rank makes, and all ranks write into."""

import importlib
import time
from pathlib import Path
from typing import Any

from lightning_shard.processes.failures.failure_watch import check_ranks
from lightning_shard.processes.store import store_of_attempt

PATIENCE_S = 600.0  # for rank 0 to predict the same batch
_PASSED = "%passed"  # a file that no quoted name of an array has

Place = tuple[int, int]  # the numbers of a loader and of a batch of it


class SharedArrays:
    """Finds the arrays that the first rank has made, on the others.

    Args:
        group: The folder of the group.
        staged: The folder of what ranks leave to the first one.
    """

    def __init__(self, group: Path, staged: Path) -> None:
        self._group, self._passed = group, staged / _PASSED

    def pass_batch(self, place: Place) -> None:
        """Say, on the first rank, that it has made the arrays of a batch."""
        self._passed.parent.mkdir(parents=True, exist_ok=True)
        written = self._passed.with_suffix(".new")
        written.write_text("{} {}".format(*place))
        written.replace(self._passed)

    def array(self, name: str, place: Place) -> Any:
        """Return an array, once the first rank has made it.

        Returns:
            The array; None if the first rank has no such prediction of this batch, nor had before.

        Raises:
            TimeoutError: The first rank does not come to this batch.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            has_passed = self._is_passed(place)
            if (self._group / name / "zarr.json").exists():
                return importlib.import_module("zarr").open_array(self._group, path=name, mode="r+")
            if has_passed:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank 0 has not made {self._group / name} in {PATIENCE_S:.0f} s; the path "
                    "must lie on a file system that all ranks see."
                )
            time.sleep(0.02)
            check_ranks([0])
            # ranks that share a process take turns where they look into the store
            store_of_attempt().check(["the array of rank 0"])

    def _is_passed(self, place: Place) -> bool:
        try:
            loader, batch = map(int, self._passed.read_text().split())
        except FileNotFoundError:
            return False
        return (loader, batch) >= place
