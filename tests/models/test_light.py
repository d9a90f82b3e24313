"""Networks of small packages."""

import importlib.util

import pytest

from tests.models.check import check


def model(library, name, *marks):
    absent = importlib.util.find_spec(library) is None
    skip = pytest.mark.skipif(absent, reason=f"{library} is not installed")
    return pytest.param(library, name, marks=[skip, *marks], id=f"{library}-{name}")


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("library", "name"),
    [model("spandrel", "swinir", pytest.mark.slow), model("x_transformers", "continuous")],
)
def test_model(library, name):
    check(library, name, 2)
