"""Tiles are differentiated at once, or in turns where a Function exchanges, alike."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_speed import Launches
from benchmarks.networks import UNet
from lightning_shard import Tiles, gather, shard, use_exact_random
from lightning_shard.tiles.crew import Crew, TurnsNeededError
from lightning_shard.tiles.tile_tensor import TileTensor
from tests.parity import assert_same


class Counted(Launches):
    """Counts operators on tiles; fields are added up by their rule, as autograd does it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, TileTensor) for x in args):
            with self:
                return getattr(torch, func.overloadpacket.__name__)(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Mixed(nn.Module):
    """Exchanges by functions that autograd knows, and within autograd.Functions as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.strided = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)])
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.first(x), 3, stride=1, padding=1)
        x = self.norms[1](self.strided(self.norms[0](x))).relu()
        rows = x.flatten(2).transpose(1, 2).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(rows, rows, rows)[:, 0].transpose(1, 2).view_as(x)
        x = self.norms[2](F.interpolate(self.up(x), scale_factor=1.5, mode="bilinear"))
        return self.last(x) * x.mean((2, 3), keepdim=True).mean(1, keepdim=True)


def _found(net: nn.Module, x: Tensor, *, twice: bool = False) -> list[Tensor]:
    """The loss, and the gradients of the input, the parameters and, if wanted, of a penalty."""
    x = x.requires_grad_()
    loss = net(x).square().mean()
    if twice:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + first.square().sum()
    loss.backward()
    assert x.grad is not None
    whole = gather(x.grad) if isinstance(x, TileTensor) else x.grad
    return [loss.detach(), whole, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.slow_rows("sizes0-dims0-False", "sizes1-dims1-False", "sizes2-dims2-True")
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("sizes", "dims"), [((3,), (2,)), ((2, 2), (2, 3)), ((11,), (2,))])
def test_at_once_and_in_turns(sizes: tuple[int, ...], dims: tuple[int, ...], twice: bool) -> None:
    torch.manual_seed(0)
    net, x = Mixed().double(), torch.randn(2, 3, 13, 12, dtype=torch.float64)
    wanted = _found(copy.deepcopy(net), x.clone(), twice=twice)
    once = _found(copy.deepcopy(net), shard(x, Tiles(sizes), dims), twice=twice)
    run = Crew.run
    with (
        mock.patch.object(Crew, "run", lambda crew, job, **_: run(crew, job)),
        mock.patch.object(Crew, "run_for_all", side_effect=TurnsNeededError),
    ):
        turns = _found(copy.deepcopy(net), shard(x, Tiles(sizes), dims), twice=twice)
    for found in (once, turns):
        for got, want in zip(found, wanted, strict=True):
            assert_same(got, want)


def test_kernels_of_a_step() -> None:
    torch.manual_seed(0)
    net, x = UNet(8), torch.randn(1, 3, 64, 64)
    field = shard(x, Tiles(8), 2)
    net(field)  # torch checks each kind of call once
    with Counted() as plain:
        net(x).square().mean().backward()
    with Counted() as tiles:
        net(field).square().mean().backward()
    # each tile starts what the whole field does, puts rows together, and adds gradients up
    assert tiles.seen.total() < 8 * 2.5 * plain.seen.total()
    assert tiles.seen["convolution"] == 8 * plain.seen["convolution"]


def test_weights_of_several_samples_are_one() -> None:
    """What tiles have in common is differentiated once, also where each sample has its norms."""
    counts: list[int] = []
    for samples in (1, 2):
        net, field = nn.GroupNorm(4, 8), shard(torch.randn(samples, 8, 32, 32), Tiles(8), 2)
        net(field)
        with Counted() as launches:
            net(field).square().sum().backward()
        counts.append(launches.seen.total())
    assert counts[1] < 1.1 * counts[0], counts


def test_convolutions_keep_the_order_of_memory() -> None:
    """Exact random numbers are drawn in the order in which a field lies in memory."""
    x, weight = torch.randn(2, 4, 9, 8, dtype=torch.float64), torch.randn(4, 4, 3, 3).double()
    found: list[Tensor] = []
    for field in (x, shard(x, Tiles(3), 2)):
        torch.manual_seed(1)
        with use_exact_random():
            last = torch.einsum("bchw,cd->bdhw", field, torch.eye(4).double())
            dropped = F.dropout(F.conv2d(last, weight, padding=1), 0.5)
        found.append(gather(dropped) if isinstance(dropped, TileTensor) else dropped)
    assert_same(found[1], found[0])


def test_convolutions_that_say_one_padding_in_two_ways() -> None:
    """Plans of equal windows are made once, so a plan may have windows of another convolution."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 3, 3, padding=said) for said in (1, "same", (1, 1), "same", 1)]
    net, x = nn.Sequential(*convs).double(), torch.randn(2, 3, 13, 12, dtype=torch.float64)
    wanted = _found(copy.deepcopy(net), x.clone(), twice=True)
    for got, want in zip(_found(net, shard(x, Tiles(3), 2), twice=True), wanted, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((6, 4), 0), ((6, 4, 5), 0), ((7, 4, 5), 0), ((4, 4, 5), 0), ((2, 4, 5), 0), ((6, 4, 5), 2)],
)
def test_batch_norm_of_split_samples(shape: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    net, x = nn.BatchNorm1d(4).double(), torch.randn(shape, dtype=torch.float64)
    wanted = _found(copy.deepcopy(net), x.clone())
    for got, want in zip(_found(net, shard(x, Tiles(3), dim)), wanted, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("norm", ["batch", "instance", "group", "layer"])
def test_no_tile_waits_in_a_convolution_or_a_norm(norm: str) -> None:
    """Each tile's rule ends with what it brings, so none needs a thread of its own."""
    made = {
        "batch": lambda: nn.BatchNorm2d(4),
        "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "group": lambda: nn.GroupNorm(2, 4),
        "layer": lambda: nn.LayerNorm((4, 12, 5)),
    }
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), made[norm](), nn.ReLU()).double()
    whole, x = copy.deepcopy(net), torch.randn(2, 3, 12, 5, dtype=torch.float64)
    tiles = Tiles((3,))
    made_in_tiles, expected = net(shard(x, tiles, 2)), whole(x)
    assert not tiles.crew.exchanges
    assert_same(gather(made_in_tiles), expected)
    weights = torch.randn_like(expected)
    (made_in_tiles * shard(weights, tiles, 2)).sum().backward()
    (expected * weights).sum().backward()
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert_same(p.grad, q.grad, name)
    for ours, theirs in zip(net.buffers(), whole.buffers(), strict=True):
        assert_same(ours, theirs)


def test_an_error_after_all_tiles_have_come_leaves_the_tiles_usable() -> None:
    net, tiles = nn.BatchNorm2d(3).double(), Tiles((3,))
    x = shard(torch.randn(1, 3, 9, 4, dtype=torch.float64), tiles, 2)
    with (
        mock.patch(
            "lightning_shard.ops.norm.batch_norm.update_running", side_effect=ZeroDivisionError
        ),
        pytest.raises(ZeroDivisionError),
    ):
        net(x)
    assert_same(gather(net(x)), copy.deepcopy(net)(gather(x)))


def test_threads_end_with_their_tiles(capfd):
    """Also where one looks for the tiles while they are being deleted, as they are still there."""
    crew = Crew(3)
    crew._begin_threads()
    threads = [*crew._threads]
    crew.__del__()  # a thread that wakes here finds them
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert "release unlocked lock" not in capfd.readouterr().err


def test_second_gradients_of_frames_that_no_tile_has() -> None:
    """Tiles along two dims; of one frame those of the second row of the grid have none."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            frames = x.transpose(1, 2).flatten(0, 1)
            return self.conv(frames).sin().unflatten(0, (1, -1)).transpose(1, 2)

    torch.manual_seed(0)
    net, x = Frames().double(), torch.randn(1, 2, 1, 3, 3, dtype=torch.float64)
    wanted = _found(copy.deepcopy(net), x.clone(), twice=True)
    for got, want in zip(
        _found(net, shard(x, Tiles((2, 2)), (2, 3)), twice=True), wanted, strict=True
    ):
        assert_same(got, want)
