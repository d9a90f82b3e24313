"""torch.autograd on split tensors, and what Python sees of a split tensor."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests import OLDEST
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 3, 7, 3)


def make():
    x = torch.randn(SHAPE, dtype=torch.float64)
    w = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    return x, w


def model(x, w):
    return F.conv2d(x, w, padding=1).tanh()


def leaf(x, mesh, dims):
    return lightning_shard.shard(x, mesh, dims).clone().detach().requires_grad_()


@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[3], [2, 3]], ids=str)
def test_grad_of_split_and_plain_inputs(dims):
    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    x, w = make()
    x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
    split, plain = leaf(x, mesh, dims), w.clone().requires_grad_()
    wanted = torch.autograd.grad(model(x_, w_).square().sum(), [x_, w_])
    found = torch.autograd.grad(model(split, plain).square().sum(), [split, plain])
    torch.testing.assert_close(lightning_shard.gather(found[0]), wanted[0])
    torch.testing.assert_close(found[1], wanted[1])
    if OLDEST:  # it takes no dict of inputs
        return
    seed = torch.randn(2, 4, 7, 3, dtype=torch.float64)
    wanted = torch.autograd.grad(model(x_, w_), {"x": x_, "w": w_}, seed)
    found = torch.autograd.grad(model(split, plain), {"x": split, "w": plain}, seed)
    torch.testing.assert_close(lightning_shard.gather(found["x"]), wanted["x"])
    torch.testing.assert_close(found["w"], wanted["w"])


@pytest.mark.spmd(4)
@pytest.mark.parametrize("dims", [[3], [2, 3]], ids=str)
def test_residual_of_a_differential_equation(dims):
    """Second derivatives by the coordinate in a loss, as in a physics-informed network."""

    def loss(x, w):
        u = torch.einsum("bchw,oc->bohw", x.sin(), w).tanh()
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope, x, torch.ones_like(slope), create_graph=True)
        return (bend + u.sum(1, keepdim=True)).square().mean()

    mesh = mesh_of(4) if len(dims) == 1 else mesh_of(2, 2)
    assert_parity(loss, [SHAPE, (2, 3)], {0: dims}, mesh)
    assert_double_backward(model, [SHAPE, (4, 3, 3, 3)], {0: dims}, mesh)


@pytest.mark.spmd(3)
def test_backward_and_the_gradient_of_a_leaf():
    x, w = make()
    x_, seed = x.clone().requires_grad_(), torch.randn(2, 4, 7, 3, dtype=torch.float64)
    split = leaf(x, mesh_of(3), 2)
    model(x_, w).square().sum().backward()
    model(split, w).square().sum().backward()
    assert isinstance(split.grad, DomainTensor)
    torch.testing.assert_close(lightning_shard.gather(split.grad), x_.grad)
    model(x_, w).backward(seed)
    model(split, w).backward(gradient=seed)
    torch.testing.assert_close(lightning_shard.gather(split.grad), x_.grad)
    torch.autograd.backward([model(split, w)], [lightning_shard.shard(seed, mesh_of(3), 2)])
    torch.autograd.backward([model(x_, w)], [seed])
    torch.testing.assert_close(lightning_shard.gather(split.grad), x_.grad)
    split.grad.mul_(2)
    split.grad = split.grad * 2
    torch.testing.assert_close(lightning_shard.gather(split.grad), 4 * x_.grad)
    del split.grad
    assert split.grad is None
    split.requires_grad = False
    assert not split.requires_grad
    with pytest.raises(RuntimeError, match="scalar outputs"):
        model(leaf(x, mesh_of(3), 2), w).backward()


@pytest.mark.spmd(3)
def test_hooks_see_the_gradient_of_one_process():
    x, _ = make()
    seen, results = [], []
    for given in (x.clone().requires_grad_(), leaf(x, mesh_of(3), 2)):
        inner = given.sin()
        inner.register_hook(lambda g: seen.append(lightning_shard.gather(g).clone()))
        inner.register_hook(lambda g: g.clamp(max=0.5))
        handle = given.register_hook(lambda g: g * 100)
        handle.remove()
        given.register_post_accumulate_grad_hook(
            lambda t: results.append(lightning_shard.gather(t.grad))
        )
        inner.square().sum().backward()
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(results[1], results[0])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.spmd(3)
def test_a_foreign_function_is_refused():
    split = leaf(make()[0], mesh_of(3), 2)
    with pytest.raises(UnsupportedOperationError, match="Function Double was applied"):
        Double.apply(split).sum()


@pytest.mark.spmd(3)
def test_text_and_numbers():
    x = torch.arange(14.0).reshape(1, 2, 7)
    split = lightning_shard.shard(x, mesh_of(3), 2)
    text = repr(split)
    assert text.startswith(
        "DomainTensor(shape=(1, 2, 7), dtype=torch.float32, dim 2 split over 3 ranks"
    )
    assert repr(split.to_local()) in text
    assert f"{split}" == str(split) == text
    assert 5 in split
    assert 50 not in split
    one = split[:, :1, 3:4]
    assert one.item() == float(one) == 3
    assert int(one) == 3
    assert bool(one)
    assert torch.is_tensor(split)
    assert len(split) == 1
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        bool(split)
    for name in ("numpy", "tolist", "__array__"):
        with pytest.raises(
            UnsupportedOperationError, match=r"take lightning_shard.gather\(tensor\)"
        ):
            getattr(split, name)()
    with pytest.raises(UnsupportedOperationError, match="apply_"):
        split.apply_(abs)


@pytest.mark.spmd(3)
def test_batched_gradients_are_refused():
    split = lightning_shard.shard(torch.randn(2, 3, 7), mesh_of(3), 2)
    with pytest.raises(UnsupportedOperationError, match="batched gradients"):
        torch.autograd.functional.jacobian(torch.sin, split, vectorize=True)


@pytest.mark.spmd(3)
def test_optimizing_a_split_leaf():
    x, w = make()
    ends = []
    for given in (nn.Parameter(x.clone()), leaf(x, mesh_of(3), 2)):
        optimizer = torch.optim.SGD([given], lr=0.1, momentum=0.9, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            model(given, w).square().mean().backward()
            optimizer.step()
        ends.append(lightning_shard.gather(given).detach())
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.spmd(3)
def test_full_backward_hooks_of_a_module():
    x, _ = make()
    seen, ends = [], []
    for given in (x.clone().requires_grad_(), leaf(x, mesh_of(3), 2)):
        module = nn.Tanh()
        module.register_full_backward_pre_hook(lambda m, out: (out[0].clamp(max=0.5),))
        module.register_full_backward_hook(
            lambda m, into, out: seen.append([lightning_shard.gather(g[0]) for g in (into, out)])
        )
        module(given.sin()).square().sum().backward()
        ends.append(lightning_shard.gather(given.grad))
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.spmd(3)
def test_copies():
    split = leaf(make()[0], mesh_of(3), 2)
    for copied in (copy.copy(split), copy.deepcopy(split)):
        assert copied is not split
        assert copied.requires_grad
        assert torch.equal(copied, split)
    assert copy.copy(split).to_local().data_ptr() == split.to_local().data_ptr()
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save({"x": split}, io.BytesIO())


@pytest.mark.spmd(3)
def test_functional_derivatives_equal_one_process():
    x, _ = make()
    split, functional = leaf(x, mesh_of(3), 2), torch.autograd.functional
    for name, loss in (("hvp", True), ("vhp", True), ("vjp", False), ("jvp", False)):
        results = [
            getattr(functional, name)(lambda t, loss=loss: t.sin().sum() if loss else t.sin(), t, t)
            for t in (split, x)
        ]
        torch.testing.assert_close(lightning_shard.gather(results[0][1]), results[1][1])
    with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
        (gradient,) = torch.autograd.grad(split.sin().square().sum(), split)
    torch.testing.assert_close(lightning_shard.gather(gradient), (2 * x).sin())
