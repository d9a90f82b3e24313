"""The comparison of predicted with measured steps: its figures, and one real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import slow_links
from benchmarks.forecast import FILE, by_network, merged, regret, report, rows, summary
from lightning_shard import launch, plan
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.calibrate import measured_links
from lightning_shard.lab.replay import Replay
from lightning_shard.lab.run import Task as Run
from tests.lab.test_check import Net, data


def case(mesh, seconds, predicted=None, network="CNN"):
    found = {"network": network, "ranks": 4, "mesh": mesh, "gigabits": 1.0, "memory": 2**20}
    found["seconds"] = seconds
    return found | ({} if predicted is None else {"predicted": predicted})


def forecast(seconds, memory=2**20):
    return {"seconds": seconds, "memory": memory}


MEASURED = [case([4, 1], 1.0, forecast(1.1)), case([1, 4], 0.2, forecast(0.3))]


def test_figures():
    assert regret(MEASURED) == pytest.approx(0.25)  # 4 samples in 1 s, and 1 sample in 0.2 s
    assert summary([case([1, 1], 1.0)]) == {}
    found = summary(MEASURED)
    assert found["median error of the time"] == pytest.approx(0.3)
    assert found["median error of the memory"] == 0
    assert found["choices within 10 % of the best"] == 0
    assert by_network(MEASURED) == [["CNN", "4", "2", "30%", "0.0%", "0%", "25%"]]


def test_new_cases_replace_old_ones(tmp_path):
    cases = merged(MEASURED, [case([1, 4], 0.5), case([1, 1], 1.0, network="ViT")])
    assert [c["seconds"] for c in cases] == [0.5, 1.0, 1.0]
    assert rows(MEASURED)[0] == ["CNN", "4x1", "1", "1000", "1100", "+10%", "1", "1", "+0%"]
    report({"machine": "a machine", "cases": cases[:1]}, tmp_path)
    page = (tmp_path / "forecast.md").read_text()
    assert "| CNN | 1x4 | 1 | 500 |  |  | 1 |  |  |" in page


def timed_and_measured():
    """Run on each rank of a mesh of two: timelines of two steps, and the costs of collectives."""
    from benchmarks.forecast_runs import timed_alone

    run = Run(Net(), None, first_batches(Net(), data(), "fit"), (1, 2))
    return timed_alone(run, 2), measured_links([2])


@pytest.mark.slow
def test_steps_of_all_ranks_are_timed_and_replayed():
    (first, links), (second, _) = launch(timed_and_measured, processes=2)
    steps = [*zip(first, second, strict=True)]
    assert [[line.rank for line in ranks] for ranks in steps] == [[0, 1]] * 2
    for ranks in steps:
        for line, found in zip(ranks, Replay(ranks, links.cost).run(), strict=True):
            assert found.seconds >= line.computed > 0
            assert found.busy > 0


@pytest.mark.slow
def test_measures_on_links_of_the_kernel(tmp_path):
    if lack := slow_links.missing():
        pytest.skip(lack)
    command = [sys.executable, "-m", "benchmarks.forecast", "--networks", "CNN", "--ranks", "2"]
    options = ["--gigabits", "1", "--rounds", "1", "--steps", "2", "--output", str(tmp_path)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=True, timeout=500,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert "| CNN | 1x2 | 1 |" in done.stdout
    assert "| CNN | 2x1 | unthrottled |" in done.stdout
    for found in json.loads((tmp_path / FILE).read_text())["cases"]:
        assert found["predicted"]["memory"] == pytest.approx(found["memory"], rel=0.1)


def test_what_kernels_of_a_gpu_take_is_not_predicted_for_a_cpu():
    """The CNN has convolutions, for which cuDNN takes as much as its tensors."""
    from benchmarks.forecast_runs import planned_memory, task_and_data

    planned = plan(*task_and_data("CNN", 1), mesh=(1, 2))
    assert planned_memory("CNN", (1, 2)) == planned.memory
