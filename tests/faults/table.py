"""All cells of the fault matrix, counted by class: `python -m tests.faults.table` (minutes)."""

import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.faults.cells import CELLS, Cell
from tests.faults.run import LIMIT_S, Seen, run

HEAD = (
    f"| fault | cells | all ranks ended within {LIMIT_S:.0f} s | longest (s) | every rank names "
    "the guilty one | checkpoints intact |\n| --- | --- | --- | --- | --- | --- |"
)


def row(kind: str, seen: list[tuple[Cell, Seen]]) -> str:
    """The counts of one class of cells."""
    in_time = sum(s.seconds < LIMIT_S for _, s in seen)
    named = sum(s.names(cell) for cell, s in seen)
    intact = sum(not s.damaged for _, s in seen)
    longest = max(s.seconds for _, s in seen)
    return f"| {kind} | {len(seen)} | {in_time} | {longest:.1f} | {named} | {intact} |"


def main() -> None:
    """Print the table of docs/reliability.md."""
    kinds = defaultdict[str, list[tuple[Cell, Seen]]](list)
    for cell in CELLS:
        folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by a rank's end
        seen = run(cell, folder)
        shutil.rmtree(folder)
        kinds[cell.kind].append((cell, seen))
        print(f"{cell}: {seen.seconds:.1f} s, codes {seen.codes}", file=sys.stderr, flush=True)
    print(HEAD)
    for kind, seen in kinds.items():
        print(row(kind, seen))


if __name__ == "__main__":
    main()
