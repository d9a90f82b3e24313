"""Each cell of the fault matrix keeps the promises of docs/reliability.md.

`python -m pytest -m slow tests/faults` runs all cells, `python -m tests.faults.table` counts them.
"""

import pytest
import torch

from lightning_shard.processes.failures.failure import SIGTERM_CODE
from lightning_shard.trainer.held_signals import LIMIT
from tests.faults.cells import CELLS, FAST, IN_FLIGHT, REPLICAS, TWICE, Cell
from tests.faults.ranks import AT_STEP
from tests.faults.run import LIMIT_S, run

QUICK = [*FAST, IN_FLIGHT[0], REPLICAS[0]]


@pytest.mark.quick_rows("sigterm, forward, rank 1 of 2")
@pytest.mark.parametrize(
    "cell",
    [Cell("sigint of all", "forward", 1), *(Cell("sigterm", "forward", rank) for rank in (0, 1))],
    ids=str,
)
def test_a_signal_saves_after_the_step(cell, tmp_path):
    """One rank hears it in a step, and the others wait for that one in a collective."""
    seen = run(cell, tmp_path)
    outputs = [(tmp_path / f"output_{rank}").read_text() for rank in range(2)]
    assert all("Traceback" not in output for output in outputs), outputs
    is_sigterm = cell.fault == "sigterm"
    assert outputs[0].count("Press Ctrl-C again") == (not is_sigterm)
    assert outputs[cell.rank].count("SIGTERM: the training ends before") == is_sigterm
    assert "no checkpoint was saved" not in outputs[0] + outputs[1]
    assert seen.codes == [SIGTERM_CODE if is_sigterm else 1] * 2
    assert not seen.damaged
    steps = {torch.load(p, weights_only=True)["global_step"] for p in tmp_path.glob("*.ckpt")}
    assert steps == {2, AT_STEP + 1}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_ends_all_alike_where_one_hears_late(rank, tmp_path):
    """It would take rank 0, which holds the store, for lost."""
    seen = run(cell := Cell("sigterm", "setup", rank), tmp_path, late_s=2.5)
    assert seen.codes == [SIGTERM_CODE] * 2, "\n\n".join(seen.last_lines)
    assert seen.names(cell), "\n\n".join(seen.last_lines)


@pytest.mark.quick_rows("1")
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_ends_all_in_time(rank, monkeypatch, tmp_path):
    """One rank is in a step that does not end, and the other waits for it in a collective."""
    monkeypatch.setenv(LIMIT, "1")
    cell = Cell("sigterm in a step that does not end", "forward", rank)
    seen = run(cell, tmp_path)
    assert seen.seconds < LIMIT_S
    assert seen.codes == [SIGTERM_CODE] * 2, seen
    assert seen.names(cell), "\n\n".join(seen.last_lines)
    assert f"of SIGTERM on rank {rank}, 1 s ago ({LIMIT})" in seen.last_lines[rank]


@pytest.mark.slow
def test_a_second_ctrl_c_says_that_nothing_was_saved(tmp_path):
    """One rank waits in a collective for the other, so they cannot save what both have."""
    seen = run(TWICE[0], tmp_path)
    last = tmp_path / "step=2.ckpt"
    for rank in range(2):
        output = (tmp_path / f"output_{rank}").read_text()
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
        for c in [*CELLS, *IN_FLIGHT, *REPLICAS, *TWICE]
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
