"""Metrics of torchmetrics on split maps are exact or refused by name, as docs/metrics.md says."""

from pathlib import Path

import pytest

from benchmarks.metrics import EXACT, cases, outcomes

FAST = frozenset({
    "BinaryAccuracy", "BinaryAUROC", "BinaryROC", "MulticlassJaccardIndex",
    "MulticlassAveragePrecision", "MultilabelF1Score", "MeanSquaredError", "PearsonCorrCoef",
    "SpearmanCorrCoef", "R2Score", "DiceScore", "PeakSignalNoiseRatio",
    "StructuralSimilarityIndexMeasure", "ScaleInvariantSignalNoiseRatio",
})  # fmt: skip


def check(found):
    other = {name: text for name, text in found.items() if text != EXACT}
    assert all(text.startswith("refused: ") for text in other.values()), other


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_frequent_metrics():
    check(outcomes([case for case in cases() if case.name in FAST]))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_frequent_metrics_over_replicas():
    check(outcomes([case for case in cases() if case.name in FAST]))


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [2, 4])
def test_every_metric(domain):
    check(outcomes([*cases()], domain))


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_the_table_is_what_is_found():
    rows = (Path(__file__).parents[2] / "docs/metrics.md").read_text().splitlines()
    found = outcomes([*cases()])
    said = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    expected = [[case.name, found[case.key]] for case in cases()]
    assert [row for row in said if row[0] not in ("metric", "---")] == expected
