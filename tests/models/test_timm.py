"""Networks of timm."""

import pytest

from tests.models.check import check


@pytest.mark.quick_rows("test_mambaout")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "name",
    [
        "test_convnext",
        "test_efficientnet",
        "test_mambaout",
        "test_vit",
        pytest.param("xcit_nano_12_p8_224", marks=pytest.mark.slow),
        "swinv2_tiny_window8_256",
    ],
)
def test_model(name):
    check("timm", name, 2)
