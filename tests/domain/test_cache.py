import pytest
import torch
import torch.nn.functional as F

import lightning_shard
from lightning_shard.domain.cache import CONSTANTS, ENTRY, TensorCache
from tests.parity import assert_same, mesh_of

ROW = 1024 + ENTRY  # bytes of one tensor of 128 float64, and of what keeps it


def rows(cache):
    made = []

    @cache.made_once
    def row(number):
        made.append(number)
        return torch.full((128,), float(number), dtype=torch.float64)

    return row, made


def test_what_was_used_longest_ago_goes_first():
    cache = TensorCache(limit=3 * ROW)
    row, made = rows(cache)
    for number in (0, 1, 2, 0, 3):  # 3 drops 1, which was used before 0
        assert row(number)[0] == number
    assert (len(cache), cache.held) == (3, 3 * ROW)
    assert made == [0, 1, 2, 3]
    row(0)
    row(1)
    assert made == [0, 1, 2, 3, 1]


def test_a_value_larger_than_the_limit_is_not_kept():
    cache = TensorCache(limit=ROW - 1)
    row, made = rows(cache)
    row(0)
    row(0)
    assert (made, len(cache), cache.held) == ([0, 0], 0, 0)


def test_small_values_do_not_grow_without_end():
    cache = TensorCache(limit=10 * ENTRY)

    @cache.made_once
    def number(of):
        return torch.tensor(of)

    assert [int(number(n)) for n in range(50)] == [*range(50)]
    assert 5 < len(cache) < 10


def test_clear_drops_everything():
    cache = TensorCache()
    row, made = rows(cache)
    row(0)
    cache.clear()
    assert (len(cache), cache.held) == (0, 0)
    row(0)
    assert made == [0, 0]


def test_tensors_in_tuples_are_counted():
    cache = TensorCache()

    @cache.made_once
    def pair(size):
        return torch.zeros(size), (torch.zeros(size), "name")

    pair(256)
    assert cache.held == 2 * 1024 + ENTRY


def test_a_failure_is_not_kept():
    cache = TensorCache()

    @cache.made_once
    def fails():
        raise RuntimeError("no memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            fails()
    assert len(cache) == 0


def test_dropped_while_autograd_has_saved_it():
    cache = TensorCache(limit=ROW)
    row, _ = rows(cache)
    x = torch.ones(128, dtype=torch.float64, requires_grad=True)
    y = x * row(3)
    row(4)  # drops row(3)
    cache.clear()
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))


def test_made_in_inference_mode_and_used_in_training():
    cache = TensorCache()
    row, _ = rows(cache)
    with torch.inference_mode():
        row(2)
    x = torch.ones(128, dtype=torch.float64, requires_grad=True)
    (x * row(2)).sum().backward()
    assert not row(2).is_inference()


def test_fake_tensors_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    cache = TensorCache()
    row, _ = rows(cache)
    with FakeTensorMode():
        row(0)
    assert type(row(0)) is torch.Tensor


@pytest.mark.spmd(2)
def test_many_resolutions_stay_under_the_limit():
    """Transforms, norms and interpolations of many extents, in less room than they ask for."""
    CONSTANTS.clear()
    before, CONSTANTS.limit = CONSTANTS.limit, 20_000
    try:
        most = 0
        for extent in range(24, 44, 2):
            x = torch.randn(1, 2, extent, 8, dtype=torch.float64)
            found, expected = (
                step(y) for y in (lightning_shard.shard(x.clone(), mesh_of(2), 2), x.clone())
            )
            for name, value in expected.items():
                assert_same(lightning_shard.gather(found[name]), value, name)
            most = max(most, CONSTANTS.held)
        assert 10_000 < most <= 20_000
    finally:
        CONSTANTS.limit = before
        CONSTANTS.clear()


def step(x):
    """Values and gradient of functions that need constant tensors."""
    x = x.detach().requires_grad_()
    modes = torch.fft.rfftn(x, dim=(-2, -1))[:, :, :9, :4]
    larger = F.interpolate(x, size=(50, 9), mode="bilinear")
    means = F.adaptive_avg_pool2d(F.group_norm(x, 1), 7)
    loss = modes.abs().square().mean() + larger.square().mean() + means.square().mean()
    loss.backward()
    return {"loss": loss.detach(), "larger": larger.detach(), "gradient": x.grad}
