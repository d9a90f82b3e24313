"""Inverse real transforms of any spectrum are a CPU's, and show a device nothing else."""

import copy
import itertools
from typing import Any

import pytest
import torch
from neuralop.layers.spectral_convolution import SpectralConv
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.ops.spectral.real_inverse import real_inverse
from tests.parity import assert_same, mesh_of


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        (None, None),
        (None, (2, 1)),
        ((6, 8), None),
        ((5, 9), (1, 3)),
        ((12,), (-1,)),
        ((4, -1), (1, 2)),
        ((7, 4, 11), (-3, -2, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
def test_numbers_are_those_of_torch(sizes: Any, dims: Any, norm: str | None) -> None:
    x = torch.randn(3, 6, 5, 7, dtype=torch.complex128, requires_grad=True)
    found, expected = (f(x, sizes, dims, norm) for f in (real_inverse, torch.fft.irfftn))
    assert_same(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)]
    assert_same(*map(torch.view_as_real, gradients))


class RealEnds(TorchDispatchMode):
    """Refuses an inverse of a spectrum that no real data has along its last dim."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fft_c2r.default:
            spectrum, (*others, last), _, extent = args
            assert not others, "of several dims the device takes the symmetry as given"
            ends = {0, extent // 2} if extent % 2 == 0 else {0}
            for end in ends & {*range(spectrum.shape[last])}:
                assert not spectrum.select(last, end).imag.any()
            self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.spmd(1, "xpu")
@pytest.mark.parametrize("extents", [(16, 12), (64,), (9, 7), (8, 6, 4)], ids=str)
def test_a_layer_on_a_device_has_the_numbers_of_a_cpu(extents: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = SpectralConv(3, 3, tuple(min(n, 6) for n in extents))
    ours = copy.deepcopy(layer).to("xpu")
    avoid_whole_fields(ours, mesh_of(1))
    x = torch.randn(2, 3, *extents)
    with RealEnds() as inverses:
        found = ours(x.to("xpu"))
    assert inverses.seen == 1
    assert_same(found.cpu(), layer(x))


def test_which_fields_are_small() -> None:
    layer, x = SpectralConv(3, 3, (4, 4)), torch.randn(1, 3, 8, 8)
    avoid_whole_fields(layer)
    for dtype, is_cast in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        with torch.autocast("cpu", enabled=is_cast):
            served = layer._serves(x.to(dtype))
        assert served == (dtype == torch.float32 and not is_cast)
    layer.fno_block_precision = "mixed"
    assert not layer._serves(x)
