"""Running a cell, and what was seen."""

import json
import multiprocessing
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.manifest import problem_of, read_manifest
from tests import pool
from tests.faults import ranks
from tests.faults.cells import AFTER, Cell

START_S = 120.0  # until the fault, on a loaded machine
END_S = 90.0  # until a rank that hangs is killed
LIMIT_S = 15.0  # what docs/reliability.md promises
LINES = 5


@dataclass
class Seen:
    """What a cell showed.

    Attributes:
        seconds: From the fault, or from when it is noticed that a data worker is stopped, to the
            end of the last rank; infinite where a rank had to be killed.
        codes: The exit status of each rank.
        last_lines: What each rank printed last.
        damaged: Checkpoints that changed or are not whole.
    """

    seconds: float
    codes: list[int]
    last_lines: list[str]
    damaged: list[str]

    def names(self, cell: Cell) -> bool:
        """Whether the last line of each rank that could still speak says which rank failed.

        Who is interrupted says nothing more, since the user knows; and nobody has to where all end
        and save between two batches.
        """
        is_held = cell.phase not in ("setup", "sanity", *AFTER)
        if "sigint of all" in cell.fault or (cell.fault in ("sigint", "sigterm") and is_held):
            return not any("failed first" in lines for lines in self.last_lines)
        silent = {cell.rank} if cell.fault in ("kill", "segfault", "_exit", "sigint") else set()
        return all(
            f"rank {cell.rank}" in lines.splitlines()[-1]
            for rank, lines in enumerate(self.last_lines)
            if rank not in silent
        )


def run(cell: Cell, folder: Path, *, late_s: float = 0.0) -> Seen:
    """Run the ranks of a cell as forks of a process that has imported all they need.

    Args:
        cell: The fault.
        folder: Where the ranks write.
        late_s: Seconds between two looks of the others into the store, as on a busy machine.
    """
    context = multiprocessing.get_context("fork")
    port = pool.free_port()
    processes = [
        context.Process(
            target=ranks.main, args=(cell, rank, port, folder, late_s if rank != cell.rank else 0)
        )
        for rank in range(cell.ranks)
    ]
    pool.start_all(processes)
    try:
        ended = _wait(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()
    outputs = [(folder / f"output_{rank}").read_text() for rank in range(cell.ranks)]
    assert (folder / "struck.json").exists(), "the fault did not happen\n" + "\n".join(outputs)
    struck = json.loads((folder / "struck.json").read_text())
    damaged = [p for p, was in struck["kept"].items() if ranks.digest(Path(p)) != was]
    damaged += [str(p) for p in folder.glob("*.ckpt") if not _whole(p)]
    return Seen(
        seconds=ended - struck["at"],
        codes=[process.exitcode for process in processes],
        last_lines=["\n".join(text.strip().splitlines()[-LINES:]) for text in outputs],
        damaged=damaged,
    )


def _wait(processes: list[Any], folder: Path) -> float:
    """Wait for all ranks; when the last one ended."""
    deadline = time.monotonic() + START_S
    while any(process.is_alive() for process in processes):
        if (folder / "struck.json").exists():
            deadline = min(deadline, time.monotonic() + END_S)
        if time.monotonic() > deadline:
            return float("inf")
        time.sleep(0.05)
    return time.time()


def _whole(checkpoint: Path) -> bool:
    """Whether all that a checkpoint's checksums are of is there, and as it was."""
    if checkpoint.is_dir():
        return read_manifest(checkpoint) is not None and problem_of(checkpoint) is None
    return zipfile.is_zipfile(checkpoint) and zipfile.ZipFile(checkpoint).testzip() is None
