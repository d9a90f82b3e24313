"""A split field that is optimised itself: adversarial noise, data assimilation, inversion.

Clipping, optimizers and updates by hand give what one process gives.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import lightning_shard
from lightning_shard import UnsupportedOperationError
from tests.parity import assert_same, mesh_of, tiles_of

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.05, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=4, line_search_fn="strong_wolfe"),
}


def mismatch(field: Tensor, observed: Tensor, weight: Tensor) -> Tensor:
    """What a forecast from the field differs from what was seen, and how rough the field is."""
    forecast = F.conv2d(field, weight, padding=1).tanh()
    return (forecast - observed).square().sum() + 0.1 * field.diff(dim=2).square().sum()


def optimised(name: str, field: Tensor, observed: Tensor, weight: Tensor) -> list[Tensor]:
    """The losses and the field."""
    optimizer = OPTIMIZERS[name]([field])
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mismatch(field, observed, weight)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(3):
        optimizer.step(closure)  # pyright: ignore[reportCallIssue] - a tensor, as LBFGS wants
    return [*losses, lightning_shard.gather(field.detach())]


def fields(rows: int) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(rows)
    field, observed = torch.randn(2, 1, 2, rows, 3, dtype=torch.float64)
    return field, observed, torch.randn(2, 2, 3, 3, dtype=torch.float64)


@pytest.mark.slow_rows("lbfgs", "adamw", "adagrad")
@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers(name):
    for rows in (2, 7):
        field, observed, weight = fields(rows)
        alone = field.clone().requires_grad_()
        expected = optimised(name, alone, observed, weight)
        split, seen = (lightning_shard.shard(t, mesh_of(3), 2) for t in (field, observed))
        found = optimised(name, split.requires_grad_(), seen, weight)
        assert len(found) == len(expected)
        for value, correct in zip(found, expected, strict=True):
            assert_same(value, correct, f"{name}, {rows} rows")


def by_hand(field: Tensor, observed: Tensor, weight: Tensor) -> Tensor:
    for step in range(4):
        mismatch(field, observed, weight).backward()
        gradient = field.grad
        assert gradient is not None
        with torch.no_grad():
            if step == 0:
                field -= 0.1 * gradient
            elif step == 1:
                field.sub_(gradient.sign(), alpha=0.01).clamp_(-1, 1)
            elif step == 2:
                field.data.add_(gradient, alpha=-0.1)
            else:
                field[..., 1:, :] -= 0.1 * gradient[..., 1:, :]
        if step % 2:
            gradient.zero_()
        else:
            field.grad = None
    return lightning_shard.gather(field.detach())


@pytest.mark.spmd(3)
def test_updates_by_hand():
    for rows in (2, 7):
        field, observed, weight = fields(rows)
        expected = by_hand(field.clone().requires_grad_(), observed, weight)
        split, seen = (lightning_shard.shard(t, mesh_of(3), 2) for t in (field, observed))
        assert_same(by_hand(split.requires_grad_(), seen, weight), expected)


def clipped(field: Tensor, observed: Tensor, weight: Tensor, clip: Any) -> list[Tensor]:
    weight = weight.clone()
    mismatch(field, observed, weight).backward()
    total = clip(field)
    assert field.grad is not None
    norm = [lightning_shard.gather(total)] if isinstance(total, Tensor) else []
    return [*norm, lightning_shard.gather(field.grad)]


@pytest.mark.spmd(3)
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping(foreach):
    for clip in (
        lambda x: clip_grad_norm_(x, 0.5, foreach=foreach),
        lambda x: clip_grad_norm_([x], 0.5, norm_type=float("inf"), foreach=foreach),
        lambda x: clip_grad_value_(x, 0.1, foreach=foreach),
        lambda x: get_total_norm([x.grad], foreach=foreach),
    ):
        for rows in (2, 7):
            field, observed, weight = fields(rows)
            expected = clipped(field.clone().requires_grad_(), observed, weight, clip)
            split, seen = (lightning_shard.shard(t, mesh_of(3), 2) for t in (field, observed))
            found = clipped(split.requires_grad_(), seen, weight, clip)
            for value, correct in zip(found, expected, strict=True):
                assert_same(value, correct)


@pytest.mark.spmd(3)
def test_kernels_of_many_tensors_are_refused_by_name():
    """Those that `foreach=True` and `fused=True` ask for; torch chooses neither by itself here."""
    field, observed, weight = fields(2)
    split, seen = (lightning_shard.shard(t, mesh_of(3), 2) for t in (field, observed))
    split.requires_grad_()
    mismatch(split, seen, weight).backward()
    before = lightning_shard.gather(split.detach())
    for run in (
        lambda: clip_grad_norm_(split, 0.5, foreach=True),
        lambda: torch.optim.SGD([split], 0.1, momentum=0.9, foreach=True).step(),
        lambda: torch.optim.Adam([split], 0.1, foreach=True).step(),
        lambda: torch.optim.Adam([split], 0.1, fused=True).step(),
    ):
        with pytest.raises(UnsupportedOperationError, match=r"_foreach_|_fused_"):
            run()
    assert lightning_shard.gather(split.detach()).equal(before)


def perturbed(x, plain):
    """A perturbation by the sign of its gradient, clamped, as in fast adversarial training."""
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        ((x + delta) ** 3).sum().backward()
        delta.data = torch.clamp(delta + 0.1 * delta.grad.sign(), -0.15, 0.15)
        delta.grad.zero_()
    shared = delta.detach()
    delta.data[0] = 0
    kept = delta * x
    delta.data = plain
    return kept, shared, delta * x


def check_assigned_data(domain, dim):
    x, plain = (torch.randn(7, 3, dtype=torch.float64) for _ in range(2))
    split = lightning_shard.shard(x, domain, dim)
    for found, value in zip(perturbed(split, plain), perturbed(x, plain.clone()), strict=True):
        assert torch.equal(lightning_shard.gather(found), value)
    for other in (torch.zeros(3, 3, dtype=torch.float64), torch.zeros(7, 3)):
        with pytest.raises(lightning_shard.UnsupportedOperationError, match="a value of shape"):
            split.data = other


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dim", [0, 1])
def test_data_is_assigned(dim):
    check_assigned_data(mesh_of(3), dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_data_is_assigned_in_tiles(dim):
    check_assigned_data(tiles_of(3), dim)


CHANGES_OF_SHAPE = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "unsqueeze_ and squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "swapdims_": lambda x: x.swapdims_(0, 1),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("way", CHANGES_OF_SHAPE)
def test_a_leaf_whose_shape_changed_is_trained(way):
    torch.manual_seed(0)
    field = torch.randn(7, 3, dtype=torch.float64)
    results = []
    for x in (field.clone(), lightning_shard.shard(field, mesh_of(2), 0)):
        x.requires_grad_()
        with torch.no_grad():
            CHANGES_OF_SHAPE[way](x)
        optimizer = torch.optim.SGD([x], 0.1)
        x.square().sum().backward()
        (found,) = torch.autograd.grad((x * 3).sum(), x)
        optimizer.step()
        results.append([x.detach(), x.grad, found])
        assert x.is_leaf
    for wanted, mine in zip(*results, strict=True):
        torch.testing.assert_close(lightning_shard.gather(mine), wanted)
    with (
        torch.no_grad(),
        pytest.raises(lightning_shard.UnsupportedOperationError, match="grad = None"),
    ):
        x.unsqueeze_(0)


COPIES = {
    "torch.tensor": lambda x, like: torch.tensor(x),
    "torch.tensor of a dtype": lambda x, like: torch.tensor(x, dtype=torch.float32),
    "torch.tensor that is trained": lambda x, like: torch.tensor(x, requires_grad=True),
    "new_tensor": lambda x, like: x.new_tensor(x),
    "new_tensor of a plain one": lambda x, like: like.new_tensor(x),
    "new_tensor of a dtype": lambda x, like: like.new_tensor(x, dtype=torch.float32),
    "new_tensor that is trained": lambda x, like: x.new_tensor(x, requires_grad=True),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_copies_by_constructors(way):
    """torch warns of these, and copies without a gradient."""
    field, like = torch.randn(7, 3, dtype=torch.float64), torch.zeros(1)
    torch.distributed.broadcast(field, 0)
    split = lightning_shard.shard(field, mesh_of(2), 0)
    expected, found = COPIES[way](field, like), COPIES[way](split, like)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(lightning_shard.gather(found.detach()), expected.detach())
    if found.requires_grad:
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(lightning_shard.gather(found.grad), expected.grad)
    with torch.no_grad():
        found.zero_()
    torch.testing.assert_close(lightning_shard.gather(split), field)
