"""Functions that change nothing give the tensor itself, another view or a copy, as in torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard import Tiles, gather, shard
from tests.parity import mesh_of

SHAPE = (2, 4, 6, 8)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x[:], "dots": lambda x: x[...], "slice": lambda x: x[:, :, 0:6],
    "last": lambda x: x[..., 0:8], "narrow": lambda x: x.narrow(2, 0, 6),
    "split": lambda x: x.split(6, 2)[0], "chunk": lambda x: x.chunk(1, 2)[0],
    "tensor_split": lambda x: x.tensor_split(1, 0)[0], "reshape": lambda x: x.reshape(SHAPE),
    "view": lambda x: x.view(2, 4, 6, -1), "view_as": lambda x: x.view_as(x),
    "unflatten": lambda x: x.unflatten(2, (6,)), "flatten": lambda x: x.flatten(1, 1),
    "expand": lambda x: x.expand(SHAPE), "permute": lambda x: x.permute(0, 1, 2, 3),
    "squeeze": lambda x: x.squeeze(2), "to": lambda x: x.to(torch.float32), "real": torch.real,
    "contiguous": lambda x: x.contiguous(), "float": lambda x: x.float(), "positive": lambda x: +x,
    "dropout of validation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "dropout2d": lambda x: F.dropout2d(x, 0.5, False),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "nearest": lambda x: F.interpolate(x, size=SHAPE[2:]),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=SHAPE[2:], mode="bicubic"),
    "area": lambda x: F.interpolate(x, size=SHAPE[2:], mode="area"),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (None, None)),
    "rows repeated once": lambda x: x.repeat_interleave(1, 2), "roll": lambda x: x.roll(6, 2),
    "repeat": lambda x: x.repeat(1, 1, 1, 1), "rows by a list": lambda x: x[:, :, list(range(6))],
    "index_select": lambda x: x.index_select(2, torch.arange(6)),
    "rot90": lambda x: x.rot90(4, (2, 3)),
    "cat": lambda x: torch.cat([x], 2), "pad": lambda x: F.pad(x, (0, 0, 0, 0)),
    "flip": lambda x: x.flip(()), "pixel_shuffle": lambda x: F.pixel_shuffle(x, 1),
    "tril": lambda x: x.tril(9), "clamp": lambda x: x.clamp(min=-9),
}  # fmt: skip


@pytest.mark.quick_rows("2")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_write_reaches_what_it_reaches_in_torch(dim: int):
    """Also a change of the shape in place, which is that of the tensor itself alone."""
    check(mesh_of(3), dim)


@pytest.mark.parametrize("dim", [2, 3])
def test_a_write_reaches_what_it_reaches_in_torch_in_tiles(dim: int):
    check(Tiles((3,)), dim)


def check(where: Any, dim: int) -> None:
    for name, call in CALLS.items():
        whole = torch.arange(384.0).view(SHAPE)
        split = shard(whole.clone(), where, dim)
        expected, found = call(whole), call(split)
        assert (found is split) == (expected is whole), name
        for y in (expected, found):
            y.add_(1)
            y.unsqueeze_(0)
        assert split.shape == whole.shape, name
        assert gathered(found).equal(expected), name
        assert gathered(split).equal(whole), name


def gathered(x: Tensor) -> Tensor:
    return x if type(x) is Tensor else gather(x)


@pytest.mark.spmd(2)
def test_a_roll_of_no_rows_is_a_copy():
    """A write into it leaves the values that a gradient needs."""
    x = shard(torch.ones(0, 4), mesh_of(2), 1).requires_grad_()
    y = x * 1
    squares = y.square()
    y.roll(1, 0).mul_(2)
    squares.sum().backward()
