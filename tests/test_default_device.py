"""`torch.set_default_device`, or `with torch.device(...)` around a step, changes no number."""

import ast
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._device import _device_constructors

import lightning_shard
from tests.parity import mesh_of, ranks_of, tiles_of

PACKAGE = Path(lightning_shard.__file__).parent
MAKERS = {function.__name__ for function in _device_constructors()}


def _without_device(path: Path) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) in ("torch", "torch.fft")
        and call.func.attr in MAKERS
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_the_package_names_the_device_of_each_tensor_that_it_makes():
    """Else a table of the host is made on the user's default device, and does not mix."""
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in _without_device(path)]
    assert not found, "\n".join(found)


def _fields(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Run rules that keep tables of numbers: of frequencies, places, halos, rows and masks."""
    y = F.conv2d(F.interpolate(x, scale_factor=1.5, mode="bilinear"), weight, padding=1)
    y = y + torch.fft.irfft2(torch.fft.rfft2(y)[..., :5], s=y.shape[-2:])
    y = y + F.scaled_dot_product_attention(y, y, y, is_causal=True)
    y = y[:, :, [4, 1, 0, 6, 2]].roll(2, 2).cumsum(2)
    y[:, :, 1:4:2] = 0.5
    return y.median(2).values + y.masked_fill(y > 1, 0.1).flip(2).amax(2)


def check(where):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    weight = torch.randn(3, 3, 3, 3, dtype=torch.float64).requires_grad_()
    expected = _fields(x, weight)
    expected.square().sum().backward()
    wanted, weight.grad = weight.grad, None
    with torch.device("meta"):  # it mixes with no other
        found = lightning_shard.gather(_fields(lightning_shard.shard(x, where, 2), weight))
        found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    ranks = ranks_of(where)
    if ranks > 1:  # every rank starts the backward pass of its replica
        torch.distributed.all_reduce(weight.grad)
    torch.testing.assert_close(weight.grad / ranks, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.spmd(3)
def test_rules_on_ranks():
    check(mesh_of(3))


def test_rules_in_tiles():
    check(tiles_of(3))
