"""Functions and modules of TorchScript on split tensors."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_double_backward, assert_parity, mesh_of, tiles_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def product(a: Tensor, b: Tensor) -> Tensor:
        real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
        return torch.stack([real, a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]], -1)

    @torch.jit.script
    def gated(x: Tensor, channels: int, weights: list[Tensor]) -> Tensor:
        y = torch.tanh(x[:, :channels]) * torch.sigmoid(x[:, channels:])
        for weight in weights:
            y = product(y, weight * y)
        return y.mean(2)

    traced = torch.jit.trace(lambda x: x.roll(1, 2) * x, torch.ones(1, 1, 2))


SHAPE = (2, 4, 7, 2)


def function(x, y):
    return gated(x, 2, [y[:, :2], 2 * y[:, 2:]]), gated(x, channels=1, weights=[]), traced(x)


@pytest.mark.spmd(3)
def test_equals_one_process():
    for dim in (0, 1, 2):
        assert_parity(function, [SHAPE, SHAPE], {0: [dim], 1: [dim]}, mesh_of(3))
    assert_double_backward(function, [SHAPE, SHAPE], {0: [2], 1: [2]}, mesh_of(3))
    plain = torch.randn(SHAPE)
    torch.testing.assert_close(
        product(plain, plain)[..., 0], plain[..., 0] ** 2 - plain[..., 1] ** 2
    )


def test_equals_one_process_in_tiles():
    """A program may have no ranks at all: its first field in tiles must do what a mesh does."""
    for dim in (0, 1, 2):
        assert_parity(function, [SHAPE, SHAPE], {0: [dim], 1: [dim]}, tiles_of(3))
    assert_double_backward(function, [SHAPE, SHAPE], {0: [2], 1: [2]}, tiles_of(3))


@pytest.mark.spmd(2)
def test_modules_are_refused():
    x = lightning_shard.shard(torch.ones(2, 3, 8, 8), mesh_of(2), 2)
    network = nn.Conv2d(3, 3, 3)
    for module in (torch.jit.script(network), torch.jit.trace(network, torch.ones(1, 3, 8, 8))):
        with pytest.raises(UnsupportedOperationError, match=r"forward .* before torch\.jit"):
            module(x)


@pytest.mark.parametrize("kind", ["ranks", "tiles"])
@pytest.mark.spmd(2)
def test_an_exported_module_is_refused_and_serves_as_it_was_before(kind):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    split = lightning_shard.shard(x, mesh_of(2) if kind == "ranks" else tiles_of(2), 2)
    module = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(0, 1))
    exported = torch.export.export(module, (x,)).module()
    with torch.no_grad(), pytest.raises(UnsupportedOperationError, match=r"before torch\.export"):
        exported(split)
    torch.testing.assert_close(lightning_shard.gather(module(split)), exported(x))
