"""Each cell of the fault matrix keeps the promises of docs/reliability.md.

`python -m pytest -m slow tests/faults` runs all cells, `python -m tests.faults.table` counts them.
"""

import pytest

from lightning_shard.processes.failures.failure import SIGTERM_CODE
from tests.faults.cells import CELLS, FAST, IN_FLIGHT, REPLICAS, Cell
from tests.faults.run import LIMIT_S, run

QUICK = [*FAST, IN_FLIGHT[0], REPLICAS[0]]


def test_ctrl_c_says_that_nothing_was_saved(tmp_path):
    """One rank waits in a collective for the other, so they cannot save what both have."""
    seen = run(Cell("sigint of all", "forward", 1), tmp_path)
    last = tmp_path / "step=2.ckpt"
    for rank in range(2):
        output = (tmp_path / f"output_{rank}").read_text()
        assert "Traceback" not in output, output
        assert "failed first" not in output, output
        assert "saved checkpoint to" not in output
        (said,) = [line for line in output.splitlines() if "no checkpoint was saved" in line]
        assert said.startswith(f"[rank {rank}]")
        assert said.endswith(f"the last whole one is {last}")
    assert seen.codes == [1, 1]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [last.name]


@pytest.mark.quick_rows("kill, backward, rank 0 of 2")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id=str(c), marks=[] if c in QUICK else pytest.mark.slow)
        for c in [*CELLS, *IN_FLIGHT, *REPLICAS]
    ],
)
def test_cell(cell, tmp_path):
    seen = run(cell, tmp_path)
    assert seen.seconds < LIMIT_S, seen
    assert seen.names(cell), "\n\n".join(seen.last_lines)
    survivors = [code for rank, code in enumerate(seen.codes) if rank != cell.rank]
    expected = SIGTERM_CODE if cell.fault == "sigterm" else 1
    assert set(survivors) == {expected}, seen
    assert not seen.damaged
