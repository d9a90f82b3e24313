"""Steps of a model of the gallery in the Trainer equal those of one process."""

import pytest


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(("replicas", "domain"), [(1, (2, 2)), (2, (2,))], ids=str)
def test_steps(replicas, domain):
    from benchmarks.trained_models import compared  # which imports many packages

    loss, moved, worst = compared("timm", "test_convnext", replicas, domain)
    assert loss < 1e-12
    assert moved < 1e-9, worst
