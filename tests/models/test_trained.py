"""Steps of a model of the gallery in the Trainer equal those of one process."""

import pytest


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("library", "name", "replicas", "domain"),
    [
        ("timm", "test_convnext", 1, (2, 2)),
        ("timm", "test_convnext", 2, (2,)),
        ("handwritten", "spectral_norm_gan", 2, (2,)),  # it computes with its buffers
    ],
)
def test_steps(library, name, replicas, domain):
    from benchmarks.trained_models import compared  # which imports many packages

    loss, moved, worst = compared(library, name, replicas, domain)
    assert loss < 1e-12
    assert moved < 1e-6, worst  # a bias before a norm moves by rounding alone
