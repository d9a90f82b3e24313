"""Each cell of the fault matrix keeps the promises of docs/reliability.md.

`python -m pytest -m slow tests/faults` runs all cells, `python -m tests.faults.table` counts them.
"""

import pytest

from lightning_shard.processes.failure import SIGTERM_CODE
from tests.faults.cells import CELLS, FAST
from tests.faults.run import LIMIT_S, run


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=str(c), marks=[] if c in FAST else pytest.mark.slow) for c in CELLS],
)
def test_cell(cell, tmp_path):
    seen = run(cell, tmp_path)
    assert seen.seconds < LIMIT_S, seen
    assert seen.names(cell), "\n\n".join(seen.last_lines)
    survivors = [code for rank, code in enumerate(seen.codes) if rank != cell.rank]
    expected = SIGTERM_CODE if cell.fault == "sigterm" else 1
    assert set(survivors) == {expected}, seen
    assert not seen.damaged
