"""Metrics of torchmetrics on split maps are exact or refused by name, as docs/metrics.md says."""

from pathlib import Path

import pytest

from benchmarks.metrics import EXACT, PACKAGES, cases, outcomes

PAGE = Path(__file__).parents[2] / "docs/metrics.md"


def of_package(package):
    return [case for case in cases() if case.package == package]


def said(package):
    section = PAGE.read_text().partition(f"\n## {package}: ")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")]
    return dict(rows[2:])


def check(chosen, domain):
    found = outcomes(chosen, domain)
    expected = said(chosen[0].package)
    assert {case.name: found[case.key] for case in chosen} == {
        case.name: expected[case.name] for case in chosen
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_each_metric_is_in_the_table(package):
    names = [case.name for case in of_package(package)]
    assert [*said(package)] == names
    results = said(package).values()
    assert all(result == EXACT or result.startswith("refused: ") for result in results)


@pytest.mark.spmd(2)
def test_a_metric_of_the_order_of_values():
    check([case for case in cases() if case.name == "BinaryAUROC"], 2)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_metric(package):
    check(of_package(package), 2)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [2, 4])
@pytest.mark.parametrize("package", PACKAGES)
def test_every_metric_on_four_ranks(package, domain):
    check(of_package(package), domain)
