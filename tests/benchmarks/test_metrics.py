"""Metrics of torchmetrics on split maps are exact or refused by name, as docs/metrics.md says."""

import pytest

from benchmarks.metrics import EXACT, cases, outcome
from tests.parity import mesh_of

FAST = frozenset({
    "BinaryAccuracy", "BinaryROC", "MulticlassJaccardIndex", "MulticlassConfusionMatrix",
    "MultilabelF1Score", "MeanSquaredError", "PearsonCorrCoef", "R2Score", "DiceScore",
    "PeakSignalNoiseRatio", "StructuralSimilarityIndexMeasure", "ScaleInvariantSignalNoiseRatio",
})  # fmt: skip


def check(case):
    found = outcome(case, mesh_of(2))
    assert found == EXACT or "refused: " in found, found


@pytest.mark.spmd(2)
def test_frequent_metrics():
    for case in cases():
        if case.name in FAST:
            check(case)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", [case.name for case in cases()])
def test_every_metric(name):
    check(next(case for case in cases() if case.name == name))
