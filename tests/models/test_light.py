"""Networks of small packages."""

import pytest

from tests.models.check import check


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("library", "name"), [("spandrel", "swinir"), ("x_transformers", "continuous")]
)
def test_model(library, name):
    pytest.importorskip(library, reason=f"{library} is not installed")
    check(library, name, 2)
