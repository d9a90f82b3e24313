"""A run of all tests, without the slow ones, covers every row of the tables."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.fsdp.test_features import ON_REPLICAS, WITH_A_DOMAIN
from tests.ops import database
from tests.ops.families import FAMILIES
from tests.trainer.test_features import FEATURES
from tests.training import MODELS

ROOT = Path(__file__).parents[1]
WHOLE = pytest.Config.ArgsSource.TESTPATHS, "not slow", ""


@pytest.fixture
def rows(request):
    """The values with which a test of this session is called, by its file and name."""
    config = request.config
    if (config.args_source, config.option.markexpr, config.option.keyword) != WHOLE:
        pytest.skip("counts the tests of a run of all of them: `bash tests/run`")
    found = defaultdict(list)
    for item in request.session.items:
        if callspec := getattr(item, "callspec", None):
            found[item.nodeid.split("[")[0].removeprefix("tests/")].append(callspec.params)
    return found


@pytest.mark.parametrize(
    ("test", "argument", "table"),
    [
        ("trainer/test_features.py::test_on_each_mesh_by_turns", "name", FEATURES),
        ("fsdp/test_features.py::test_on_two_data_replicas", "row", ON_REPLICAS),
        (
            "fsdp/test_features.py::test_with_a_domain_accumulation_and_clipping",
            "row",
            WITH_A_DOMAIN,
        ),
        ("ops/test_families.py::test_three_ranks", "family", FAMILIES),
        ("ops/test_families.py::test_two_by_two", "family", FAMILIES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_row_runs(rows, test, argument, table):
    assert {row[argument] for row in rows[test]} == {*table}


@pytest.mark.parametrize(
    ("test", "table"),
    [("three_ranks", database.names()), ("second_gradients", database.twice_differentiable()[::8])],
    ids=["three_ranks", "second_gradients"],
)
def test_every_row_of_the_database_runs(rows, test, table):
    groups = [row["names"] for row in rows[f"ops/test_operators.py::test_{test}"]]
    assert sorted(name for group in groups for name in group) == sorted(table)


@pytest.mark.parametrize(
    ("test", "domains", "single"),
    [
        ("test_mesh_1x1", [None], []),
        ("test_two_ranks", [(2,)], [None]),
        ("test_four_ranks", [(2, 2)], []),
    ],
)
def test_every_model_is_exact_on_every_mesh(rows, test, domains, single):
    """In double precision; in single precision each is on one of those of two ranks."""
    calls = rows[f"trainer/test_exactness.py::{test}"]
    for dtype, meshes in ((torch.float64, domains), (torch.float32, single)):
        seen = {(c["name"], c.get("domain") if dtype == torch.float64 else None)
                for c in calls if c["dtype"] == dtype}  # fmt: skip
        assert seen == {(name, mesh) for name in MODELS for mesh in meshes}


def test_every_config_is_read(rows):
    values = {str(v) for test, calls in rows.items() if test.startswith("cli/test_configs.py")
              for call in calls for v in call.values()}  # fmt: skip
    for config in (ROOT / "configs").glob("*.yaml"):
        assert any(config.stem in value for value in values), config.name
