"""Custom autograd Functions that are allowed to take split tensors."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import lightning_shard
from lightning_shard import UnsupportedOperationError, allow_function
from tests.parity import assert_double_backward, assert_parity, mesh_of

SHAPE = (2, 7, 5)


@allow_function
class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


@allow_function
class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, *grads):
        (y,) = ctx.saved_tensors
        return grads[0] * y


class Inherited(Exp):
    pass


@allow_function
class Linear(Function):
    """With parameters, which are plain, and the newer style of a context of its own."""

    @staticmethod
    def forward(x, weight, bias):
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, torch.einsum("bco,bci->oi", grads[0], x), grads[0].sum((0, 1))


@allow_function
class Clipped(Function):
    """Its backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].clamp(-0.1, 0.1)


@allow_function
class Loss(Function):
    """A plain output."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx, *grads):
        x, y = ctx.saved_tensors
        slope = grads[0] * 2 * (x - y) / x.numel()
        return slope, -slope


@allow_function
class Several(Function):
    """Outputs that are split, without a gradient, and plain."""

    @staticmethod
    def forward(ctx, x, y):
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x, y)
        return x * y, sign, (x * x).sum((1, 2))

    @staticmethod
    def backward(ctx, *grads):
        x, y = ctx.saved_tensors
        return grads[0] * y + 2 * x * grads[2][:, None, None], grads[0] * x


@allow_function
class Same(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2


@allow_function
class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)


@allow_function
class Scaled(Function):
    @staticmethod
    def forward(ctx, x, factor=2):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


CASES = {
    "input saved": (lambda x: Cube.apply(Cube.apply(x).sin()) * x, [SHAPE], {0: [1]}),
    "output saved": (lambda x: Exp.apply(x.sin()) * x, [SHAPE], {0: [1]}),
    "inherited": (lambda x: Inherited.apply(x.sin()) * x, [SHAPE], {0: [1]}),
    "parameters": (
        lambda x, w, b: Linear.apply(x, w, b).tanh(),
        [SHAPE, (3, 5), (3,)],
        {0: [1]},
    ),
    "keywords": (
        lambda x, w, b: Linear.apply(x, weight=w, bias=b).tanh(),
        [SHAPE, (3, 5), (3,)],
        {0: [1]},
    ),
    "keywords after the context": (lambda x: Scaled.apply(x, factor=3) * x, [SHAPE], {0: [1]}),
    "only keywords": (lambda x: Scaled.apply(x=x.sin()) * x, [SHAPE], {0: [1]}),
    "split weight": (
        lambda x, w, b: Linear.apply(x, w, b).tanh(),
        [SHAPE, (3, 5), (3,)],
        {0: [1], 1: [0]},
    ),
    "not linear": (lambda x: Clipped.apply(x.sin()) * x, [SHAPE], {0: [1]}),
    "plain output": (lambda x, y: Loss.apply(x, y) * x, [SHAPE, SHAPE], {0: [1], 1: [1]}),
    "plain input": (lambda x, y: Loss.apply(x, y) * x, [SHAPE, SHAPE], {0: [1]}),
    "several": (lambda x, y: tuple(Several.apply(x, y)), [SHAPE, SHAPE], {0: [1]}),
    "the first of several": (lambda x, y: Several.apply(x, y)[0], [SHAPE, SHAPE], {0: [1]}),
    "the last of several": (lambda x, y: Several.apply(x, y)[2], [SHAPE, SHAPE], {0: [1]}),
    "the input returned": (lambda x: Same.apply(x.sin()) * x, [SHAPE], {0: [1]}),
    "in a checkpoint": (
        lambda x: checkpoint(lambda a: Exp.apply(Cube.apply(a)), x.sin(), use_reentrant=False) * x,
        [SHAPE],
        {0: [1]},
    ),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case):
    assert_parity(*CASES[case], mesh_of(3))
    assert_double_backward(*CASES[case], mesh_of(3))


@pytest.mark.spmd(4)
def test_two_split_dims():
    def function(x, y):
        return Loss.apply(Exp.apply(Cube.apply(x)), y) * y

    assert_parity(function, [SHAPE, SHAPE], {0: [1, 2], 1: [1, 2]}, mesh_of(2, 2))
    assert_double_backward(function, [SHAPE, SHAPE], {0: [1, 2]}, mesh_of(2, 2))


def leaf():
    return lightning_shard.shard(torch.randn(SHAPE), mesh_of(3), 1).requires_grad_()


@pytest.mark.spmd(3)
def test_in_place_changes_are_not_missed():
    with pytest.raises(UnsupportedOperationError, match="in place"):
        InPlace.apply(leaf().sin())
    x = leaf()
    y = Exp.apply(x.sin())
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x = leaf().sin()
    y = Cube.apply(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    Same.apply(leaf().sin()).mul_(2).sum().backward()  # nothing was saved


@pytest.mark.spmd(3)
def test_without_gradients():
    x = leaf()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = Exp.apply(x)
            assert not y.requires_grad
            assert torch.equal(lightning_shard.gather(y), lightning_shard.gather(x).exp())


@pytest.mark.spmd(3)
def test_hooks_of_saved_tensors():
    x = leaf()
    whole = lightning_shard.gather(x).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.clone()):
        split, plain = (Exp.apply(Cube.apply(t)) for t in (x, whole))
    (found,), (wanted,) = (torch.autograd.grad(y.sum(), t) for y, t in ((split, x), (plain, whole)))
    torch.testing.assert_close(lightning_shard.gather(found), wanted)


@pytest.mark.spmd(3)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_anomaly_mode_finds_nan_in_gradients():
    x = leaf()
    with torch.autograd.set_detect_anomaly(True):
        assert_parity(*CASES["in a checkpoint"], mesh_of(3))
        with pytest.raises(RuntimeError, match="'CubeBackward' returned nan values"):
            (Cube.apply(x * 0) * torch.inf).sum().backward()


@pytest.mark.spmd(3)
def test_nothing_is_kept_alive():
    x = leaf()
    y = Exp.apply(Cube.apply(x))
    local, wrapper = weakref.ref(y.to_local()), weakref.ref(y)
    gc.disable()
    try:
        del y
        assert local() is None
        assert wrapper() is None
    finally:
        gc.enable()


class Foreign(Function):
    """A loss that nobody allowed."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2 * ctx.saved_tensors[0]


class Position(Function):
    """What it returns has no gradient."""

    @staticmethod
    def forward(ctx, x):
        found = x.argmax()
        ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError


class Assign(Function):
    """Writes into a plain tensor, unseen by autograd, as torchdiffeq's solvers do."""

    @staticmethod
    def forward(ctx, scratch, value, row):
        ctx.row = row
        scratch.data[row] = value
        return scratch

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], grads[0][ctx.row], None


def stages(assign, x):
    kept = torch.empty(2, *x.shape, dtype=x.dtype)
    kept = assign.apply(kept, x, 0)
    kept = assign.apply(kept, kept[0].sin() * x, 1)
    return kept[0] * kept[1]


@pytest.mark.spmd(3)
def test_a_plain_result_of_a_foreign_function_is_refused():
    x = leaf()
    with pytest.raises(UnsupportedOperationError, match="Foreign was applied to a tensor split"):
        Foreign.apply(x.sin())
    with pytest.raises(UnsupportedOperationError, match="Assign was applied to a tensor split"):
        stages(Assign, x)
    whole = lightning_shard.gather(x).detach()
    assert Position.apply(x) == whole.argmax()
    with torch.no_grad():
        torch.testing.assert_close(Foreign.apply(x), whole.square().sum())
    with lightning_shard.allow_gather(), pytest.warns(UserWarning, match="Foreign"):
        (found,) = torch.autograd.grad(Foreign.apply(x), x)
    torch.testing.assert_close(lightning_shard.gather(found), 2 * whole)


@pytest.mark.spmd(3)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.asarray, on requires_grad
@pytest.mark.parametrize("convert", [torch.as_tensor, torch.asarray])
def test_a_conversion_that_would_lose_gradients_names_one_that_keeps_them(convert):
    x = leaf()
    y = convert(x, dtype=torch.float64)
    with pytest.raises(UnsupportedOperationError, match=r"would lose .* call x\.to\(dtype\)"):
        y.square()
    (found,) = torch.autograd.grad(x.to(torch.float64).square().sum(), x)
    torch.testing.assert_close(
        lightning_shard.gather(found), 2 * lightning_shard.gather(x).detach(), rtol=1e-6, atol=1e-7
    )


@pytest.mark.spmd(3)
def test_stages_in_a_plain_tensor():
    class Allowed(Assign):
        pass

    allow_function(Allowed)
    assert_parity(lambda x: stages(Allowed, x), [SHAPE], {0: [1]}, mesh_of(3))
