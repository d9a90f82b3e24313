"""The caller's graph of fields in tiles: hooks, leaves, checkpoints, Functions, views."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision import tv_tensors
from torchvision.transforms import v2

import lightning_shard
from lightning_shard.domain.align import sum_over
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops import registry
from tests.parity import assert_same, tiles_of


def field(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 3, padding=1),
    ).double()  # fmt: skip


def cut(x: Tensor, tiles: int = 3) -> Tensor:
    return lightning_shard.shard(x, tiles_of(tiles), 2)


class Square(torch.autograd.Function):
    """A Function of a user, which nobody has allowed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


def hooked(net: nn.Module, x: Tensor) -> Tensor:
    """A hook of a field doubles its gradient, one of a weight halves its own, each called once."""
    calls: list[tuple[int, ...]] = []

    def double(gradient: Tensor) -> Tensor:
        calls.append(tuple(gradient.shape))
        return gradient * 2

    y = net[0](x)
    y.register_hook(double)
    net[3].weight.register_hook(lambda gradient: gradient / 2)
    loss = net[3](torch.tanh(y)).square().mean()
    loss.register_hook(lambda gradient: gradient * 3)
    loss.backward()
    assert calls == [tuple(y.shape)]
    return loss


def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    calls: list[int] = []

    def block(y: Tensor) -> Tensor:
        calls.append(1)
        return net(F.dropout(y, 0.2))

    found: Any = checkpoint(block, x, use_reentrant=False)
    loss = found.square().mean()
    loss.backward()
    assert len(calls) == 2  # forward, and once in backward
    return loss


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("after", [[], [nn.ReLU()]], ids=["end", "middle"])
def test_running_statistics_of_a_checkpointed_block(norm, reentrant, after):
    """torch ends the second run at the last tensor that autograd keeps: of some norms too early."""
    blocks = [nn.Sequential(norm(3, track_running_stats=True), *after).double() for _ in range(2)]
    x = field(2, 3, 7, 5)
    for block, each in zip(blocks, (x, cut(x)), strict=True):
        y: Any = checkpoint(block, each.requires_grad_(), use_reentrant=reentrant)
        y.square().mean().backward()
    torch.testing.assert_close(blocks[1].state_dict(), blocks[0].state_dict())


def custom(net: nn.Module, x: Tensor) -> Tensor:
    loss = Square.apply(net(x)).mean()
    loss.backward()
    return loss


def twice(net: nn.Module, x: Tensor) -> Tensor:
    """Two backward passes through one graph."""
    y = net(x)
    y.square().mean().backward(retain_graph=True)
    loss = y.abs().mean()
    loss.backward()
    return loss


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    y = net[0](x)
    (gradient,) = torch.autograd.grad(net[3](torch.tanh(y)).square().sum(), y, create_graph=True)
    loss = gradient.square().mean()
    loss.backward()
    return loss


def gated(net: nn.Module, x: Tensor) -> Tensor:
    """A plain tensor that comes of a field, and goes back into it."""
    y = net(x)
    gate = torch.sigmoid(y.mean((2, 3), keepdim=True))
    gate.retain_grad()
    loss = (y * gate).square().mean()
    loss.backward()
    assert gate.grad is not None
    return loss + gate.grad.sum()


def of_a_leaf(net: nn.Module, x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    net(leaf).square().mean().backward()
    assert leaf.grad is not None
    assert leaf.is_leaf
    return leaf.grad.square().sum()


def written(net: nn.Module, x: Tensor) -> Tensor:
    """Writes through views, of which others are used afterwards."""
    y = net(x) * 1
    top, rest = y[:, :, :4], y[:, :, 2:]
    top.mul_(2)
    y[:, 0] += 1
    y[:, :, 5].zero_()
    rest[:, 1].square_()
    loss = (top.sin() * 2).mean() + rest.cos().mean() + y.square().mean()
    loss.backward()
    return loss


def assembled(net: nn.Module, x: Tensor) -> Tensor:
    """Fields that are written into a plain tensor."""
    out = torch.zeros(2, *x.shape, dtype=x.dtype)
    out[0] = net(x)
    out[1] = x * 2
    loss = out.square().mean()
    loss.backward()
    return loss


PROGRAMS: list[Callable[[Any, Tensor], Tensor]] = [
    hooked, checkpointed, custom, twice, penalty, gated, of_a_leaf, written, assembled,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("tiles", [1, 3, 11])
def test_equals_one_process(program: Any, tiles: int) -> None:
    one, many, x = network(), network(), field(2, 3, 10, 7)
    torch.manual_seed(5)
    wanted = program(one, x)
    torch.manual_seed(5)
    with lightning_shard.use_exact_random():
        found = program(many, cut(x, tiles))
    assert type(found) is Tensor
    assert_same(found.detach(), wanted.detach())
    for (name, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert_same(q.grad, p.grad, name)
    for (name, b), c in zip(one.named_buffers(), many.buffers(), strict=True):
        assert_same(c.double(), b.double(), name)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten()[::2],
    "flatten some": lambda x: x.flatten(1)[:, ::3],
    "view": lambda x: x.view(-1)[3],
    "rows": lambda x: x[:, 1, ::2],
    "transposed": lambda x: x.mT[:, :, 1],
}
ORDERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x, lambda x: x.transpose(1, 3), lambda x: x.permute(2, 3, 1, 0),
    lambda x: x.flip(2).contiguous(memory_format=torch.channels_last),
]  # fmt: skip


@pytest.mark.quick_rows("(3,)-flatten")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2)], ids=str)
def test_a_write_through_a_view_has_the_gradient_of_one_process(
    view: str, sizes: tuple[int, ...], subtests: pytest.Subtests
) -> None:
    """Whatever the order of dims in memory is, of the base and of the gradient that comes."""

    def program(x: Tensor, of_base: Any, of_gradient: Any) -> list[Tensor]:
        base = of_base(x.sin()).clone()
        if "flat" in view or view == "view":
            base = base.contiguous()
        VIEWS[view](base).mul_(0.5).add_(1)
        found = of_gradient(base)
        weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(found.shape)
        loss = (found * weights).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [loss, first, second]

    def plain_gradient(x: Tensor) -> Tensor:
        base = x.sin()
        VIEWS[view](base).mul_(0.5)
        return torch.autograd.grad(base, x, torch.linspace(0, 1, 600).double().view(x.shape))[0]

    x = field(4, 5, 6, 5)
    given = lightning_shard.shard(x, tiles_of(*sizes), [2, 0][: len(sizes)])
    wanted = plain_gradient(x.clone().requires_grad_())
    assert_same(lightning_shard.gather(plain_gradient(given.clone().requires_grad_())), wanted)
    cases = itertools.product(enumerate(ORDERS), enumerate(ORDERS))
    for (m, of_base), (n, of_gradient) in cases:
        with subtests.test(base=m, gradient=n):
            wanted = program(x.clone().requires_grad_(), of_base, of_gradient)
            found = program(given.clone().requires_grad_(), of_base, of_gradient)
            for one, other in zip(found, wanted, strict=True):
                assert_same(lightning_shard.gather(one).detach(), other.detach())


def test_a_graph_is_freed_after_backward() -> None:
    loss = network()(cut(field(1, 3, 9, 5))).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_computes_on_whole_fields_where_a_gather_is_allowed() -> None:
    def loss(x: Tensor) -> Tensor:
        x = x.sin()
        with lightning_shard.allow_gather():
            ranks, diagonal = torch.linalg.svdvals(x), torch.diagonal(x, dim1=2, dim2=3)
            return (x[..., :1] * ranks[..., None, :1]).square().sum() + diagonal.exp().sum()

    whole, tiles = (x.requires_grad_() for x in (field(1, 3, 9, 5), cut(field(1, 3, 9, 5))))
    expected = loss(whole)
    with pytest.warns(UserWarning, match="has no rule for split tensors"):
        found = loss(tiles)
    assert_same(found, expected)
    gradients = [
        torch.autograd.grad(value, x)[0] for value, x in ((found, tiles), (expected, whole))
    ]
    assert_same(lightning_shard.gather(gradients[0]), gradients[1])
    with lightning_shard.allow_gather():
        with pytest.raises(UnsupportedOperationError, match="data_ptr"):
            tiles.data_ptr()
        with pytest.raises(UnsupportedOperationError, match=r"cannot run torch\.nn\.init\.normal_"):
            nn.init.normal_(tiles.detach().clone())


def test_a_row_of_all_tiles_does_not_take_the_place_of_its_field() -> None:
    x = cut(field(1, 3, 1, 5))  # the row is in one tile
    with pytest.raises(UnsupportedOperationError, match=r"as x = x\.squeeze\(dim\)"):
        x.squeeze_(2)
    assert_same(x.squeeze(2), field(1, 3, 1, 5).squeeze(2))


def test_zeros_stand_for_gradients_of_what_a_loss_does_not_read() -> None:
    read, unread = (cut(field(1, 3, 9, 5)).requires_grad_() for _ in range(2))
    weight, loss = torch.ones(3, requires_grad=True), read.sin().sum()
    found = torch.autograd.grad(loss, [read, unread, weight], materialize_grads=True)
    assert_same(lightning_shard.gather(found[0]), field(1, 3, 9, 5).cos())
    assert_same(lightning_shard.gather(found[1]), torch.zeros(1, 3, 9, 5).double())
    assert_same(found[2], torch.zeros(3))
    loss = read.sin().sum()
    first = torch.autograd.grad(loss, unread, create_graph=True, materialize_grads=True)
    assert [gradient.requires_grad for gradient in first] == [True]
    with pytest.raises(ValueError, match="Expected allow_unused to be True"):
        torch.autograd.grad(loss, unread, materialize_grads=True, allow_unused=False)


def test_refuses_what_it_does_not_serve() -> None:
    x = cut(field(1, 3, 9, 5)).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
        x[:, 1:].add_(1)
    with pytest.raises(ValueError, match="cut all fields of a computation by one"):
        x + lightning_shard.shard(field(1, 3, 9, 5), lightning_shard.Tiles(3), 2)
    with pytest.raises(UnsupportedOperationError, match=r"cannot run torch\.linalg\.svdvals"):
        torch.linalg.svdvals(x)
    with pytest.raises(UnsupportedOperationError, match=r"cannot run torch\.nn\.init\.normal_"):
        nn.init.normal_(x.detach().clone())
    loss = (x * 2).sum()
    with pytest.raises(RuntimeError, match="inside a function transform"):
        torch.autograd.grad(loss, x, torch.ones(3, dtype=x.dtype), is_grads_batched=True)
    pack: Any = lambda t: t.clone()  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        loss = (x * x).sum()
    with pytest.raises(RuntimeError, match="saved_tensors_hooks that copy"):
        loss.backward()


def test_a_rule_that_exchanges_in_some_tiles_only_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_RULES", registry._RULES.copy())

    def total(x: Any) -> Any:
        return torch.overrides.handle_torch_function(total, (x,), x)

    @lightning_shard.register_rule(total)
    def rule(func: Any, x: lightning_shard.Subdomain) -> lightning_shard.Subdomain:
        is_first = not x.layout.grid.index(x.layout.axes(2))
        return x.like(x.local if is_first else x.local + sum_over(x, x.local[:, :, :1], [2]))

    for tiles in (2, 11):
        with pytest.raises(RuntimeError, match="as a rule that decides by the rows of its tile"):
            total(cut(field(2, 3, 10, 7), tiles))
        assert penalty(network(), cut(field(2, 3, 10, 7), tiles)).isfinite()  # they can go on
    assert total(cut(field(2, 3, 10, 7), 1)).shape == (2, 3, 10, 7)


class _InTiles(nn.Module):
    """Cuts its own fields, as a network does in a loop of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles, self.norm = lightning_shard.Tiles(3), nn.InstanceNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(lightning_shard.shard(x, self.tiles, 2))


def test_a_module_that_holds_tiles_is_copied_and_saved() -> None:
    module, x = _InTiles(), field(1, 3, 9, 5)
    wanted = F.instance_norm(x)
    for copied in (copy.copy(module), copy.deepcopy(module)):
        assert_same(copied(x) + module(x), 2 * wanted)  # as averaged weights do
    assert_same(pickle.loads(pickle.dumps(module))(x), wanted)


def test_is_a_tensor_of_one_process() -> None:
    x = field(1, 3, 9, 5)
    y = cut(x)
    assert y.shape == x.shape
    assert y.stride() == x.stride()
    assert (y.numpy() == x.numpy()).all()
    assert y.tolist() == x.tolist()
    assert float(y.sum()) == pytest.approx(float(x.sum()))
    assert torch.equal(lightning_shard.gather(copy.deepcopy(y)), x)
    with pytest.raises(TypeError, match=r"pickle lightning_shard\.gather"):
        copy.copy(y).__reduce_ex__(2)
    with pytest.raises(UnsupportedOperationError, match=r"local_map\(function\)\(x\) see each"):
        y.to_local()
    with pytest.raises(UnsupportedOperationError, match="cannot be of class Image"):
        tv_tensors.Image(y)
    assert_same(v2.functional.horizontal_flip(y), x.flip(-1))
    assert_same(lightning_shard.local_map(lambda part: part + 1)(y), x + 1)
    assert "3 tiles" in repr(y)
    y.data = cut(x * 2)
    assert torch.equal(lightning_shard.gather(y), x * 2)


class Mirrored(torch.autograd.Function):
    """A Function whose gradient is a view that conjugates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].conj()


CONJUGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "square of the size": lambda x: x.conj() * x,
    "conjugate beside": lambda x: torch.stack([x, x.conj()]),
    "product of matrices": lambda x: x @ x.mH,
    "negative": lambda x: torch.stack([x.conj().imag, x.imag]),
    "function": lambda x: torch.stack([Mirrored.apply(x), x]),
}


@pytest.mark.parametrize("name", CONJUGATES)
def test_gradients_that_are_conjugates_are_added_up(name: str) -> None:
    """Autograd adds up gradients inside of an operator, where torch shows no conjugates."""
    x = torch.complex(field(1, 2, 7, 3), field(1, 2, 7, 3) + 1)
    function = CONJUGATES[name]

    def gradient(leaf: Tensor, given: Tensor) -> Tensor:
        result = lightning_shard.gather(function(given))
        weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).view(result.shape)
        return torch.autograd.grad((result.abs() * weights).sum(), leaf)[0]

    leaves = [x.clone().requires_grad_() for _ in range(2)]
    assert_same(gradient(leaves[0], cut(leaves[0])), gradient(leaves[1], leaves[1]))
