"""torch.func and forward mode on split tensors give what they give in one process."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

import lightning_shard
from lightning_shard import Tiles, UnsupportedOperationError
from tests.parity import assert_same, mesh_of
from tests.tensor.test_escape import Cube

SHAPE = (2, 4, 7, 3)


def made(*shapes):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64) for s in shapes]


def same(found, expected):
    found, expected = (tree_leaves(v) for v in (found, expected))
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert_same(lightning_shard.gather(f).detach(), e.detach())


W, B = (t * 0.3 for t in made((4, 4, 3, 3), (4,)))
FUNCTIONS = {
    "pointwise": lambda x: x.sin() * x.exp(),
    "linear": lambda x: F.linear(x.transpose(1, 3), W[:, :, 0, 0]).transpose(1, 3),
    "conv": lambda x: F.conv2d(x, W, B, padding=1).tanh(),
    "strided conv": lambda x: F.conv2d(x, W, B, stride=2, padding=1),
    "group norm": lambda x: F.group_norm(x, 2, B, B),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "batch norm": lambda x: F.batch_norm(x, None, None, B, B, training=True),
    "mean": lambda x: x.square().mean(),
    "sum of rows": lambda x: x.sin().sum(2),
    "softmax": lambda x: x.softmax(2),
    "std": lambda x: x.std((2, 3)),
    "max": lambda x: x.amax(2),
    "sort": lambda x: x.sort(2).values,
    "pool": lambda x: F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1),
    "attention": lambda x: F.scaled_dot_product_attention(
        x.transpose(1, 2), x.transpose(1, 2).cos(), x.transpose(1, 2).sin(), is_causal=True
    ),
    "attention over rows": lambda x: F.scaled_dot_product_attention(x, x.cos(), x.sin()),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[-2:]),
    "flip and pad": lambda x: F.pad(x.flip(2), (1, 0, 1, 0))[:, :, :-1, :-1],
    "write": lambda x: torch.zeros_like(x).copy_(x.sin()).mul_(x),
    "slice": lambda x: x[:, :, 1:] - x[:, :, :-1],
}


def normalized(x, dims, eps=1e-5):
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


# torch 2.15 has wrong gradients through the jvp of its own kernels of these two, as differences
# of nearby values show
FORMULAS = {
    "layer norm": lambda x: normalized(x, (1, 2, 3)),
    "batch norm": lambda x: normalized(x, (0, 2, 3)) * B[:, None, None] + B[:, None, None],
}


def grid(mesh):
    """A mesh of ranks of these sizes, or the tiles themselves."""
    return mesh if isinstance(mesh, Tiles) else mesh_of(*mesh)


def mean_over(mesh, gradients):
    if not isinstance(mesh, Tiles):
        for g in gradients:
            dist.all_reduce(g)
            g /= dist.get_world_size()


def check_jvp(name, mesh, dims):
    """The jvp, and the gradients of a loss of it by the primal and by the tangent."""
    ends = []
    x, v, seed = made(SHAPE, SHAPE, SHAPE)
    for place in (lambda t: t, lambda t: lightning_shard.shard(t, grid(mesh), dims)):
        leaf, slope = x.clone().requires_grad_(), v.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a forward mode
            function = FUNCTIONS[name] if ends else FORMULAS.get(name, FUNCTIONS[name])
            out, tangent = jvp(function, (place(leaf),), (place(slope),))
        whole = lightning_shard.gather(tangent)
        loss = (whole.square() * seed.flatten()[: whole.numel()].view(whole.shape)).sum()
        found = torch.autograd.grad(loss, [leaf, slope], allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g.contiguous() for g in found]
        ends.append([lightning_shard.gather(out), whole, *found])
    mean_over(mesh, ends[1][2:])
    same(ends[1], ends[0])


@pytest.mark.slow
def test_jvp_and_gradients_through_it(run_each):
    run_each(3, check_jvp, {n: {"name": n, "mesh": (3,), "dims": [2]} for n in FUNCTIONS})


@pytest.mark.slow
def test_jvp_on_two_by_two(run_each):
    two = {
        n: {"name": n, "mesh": (2, 2), "dims": [2, 3]} for n in FUNCTIONS if "attention" not in n
    }
    run_each(4, check_jvp, two)


def check_transform(name, mesh, dims):
    """A transform of one process, with split arguments and with split tensors in a closure."""
    x, v, w = made((2, 3, 5), (2, 3, 5), (3,))
    units = torch.eye(3, dtype=torch.float64)

    def run(place):
        x_, v_ = place(x), place(v)

        def f(t):
            return (t.sin() * w[:, None]).cumsum(2).tanh()

        def of_weights(p):
            return (x_ * p[:, None]).square().mean((1, 2)).sum()

        def loss(t):
            return f(t).square().sum()

        return {
            "grad": lambda: grad(loss)(x_),
            "grad of weights": lambda: grad(of_weights)(w),
            "vjp": lambda: vjp(f, x_)[1](v_),
            "jvp by weights": lambda: jvp(of_weights, (w,), (w.cos(),)),
            "jvp of jvp": lambda: jvp(lambda t: jvp(f, (t,), (v_,))[1], (x_,), (v_,)),
            "jvp of grad": lambda: jvp(grad(loss), (x_,), (v_,)),
            "Jacobian": lambda: torch.stack([jvp(of_weights, (w,), (e,))[1] for e in units], -1),
            "Hessian": lambda: torch.stack(
                [jvp(grad(of_weights), (w,), (e,))[1] for e in units], -1
            ),
            "gradients of samples": lambda: torch.stack(
                [grad(lambda p, t=t: (t * p[:, None]).square().sum())(w) for t in x_]
            ),
            "value too": lambda: torch.func.grad_and_value(
                lambda t, scale: (loss(t) * scale, t), has_aux=True
            )(x_, scale=2.0),
            "dual": lambda: dual(f, x_, v_),
        }[name]()

    same(run(lambda t: lightning_shard.shard(t, grid(mesh), dims)), run(lambda t: t))


def dual(function, x, v):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))))


TRANSFORMS = (
    "grad|grad of weights|vjp|jvp by weights|jvp of jvp|jvp of grad|Jacobian|Hessian|"
    "gradients of samples|value too|dual"
).split("|")


@pytest.mark.slow
def test_transforms(run_each):
    run_each(3, check_transform, {n: {"name": n, "mesh": (3,), "dims": [2]} for n in TRANSFORMS})


@pytest.mark.slow
def test_transforms_on_two_by_two(run_each):
    """Four ranks share five rows, two of them three."""
    two = {n: {"name": n, "mesh": (2, 2), "dims": [1, 2]} for n in TRANSFORMS}
    run_each(4, check_transform, two)


@pytest.mark.spmd(4)
def test_a_rank_without_rows():
    x, v = made((1, 4, 2, 3), (1, 4, 2, 3))
    for name in ("conv", "group norm", "softmax", "mean", "attention over rows"):
        ends = []
        for place in (lambda t: t, lambda t: lightning_shard.shard(t, mesh_of(4), 2)):
            with sdpa_kernel(SDPBackend.MATH):
                ends.append(jvp(FUNCTIONS[name], (place(x),), (place(v),)))
        same(ends[1], ends[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch's own, for its first dual tensor
def test_simulated_ranks():
    """They share a process, which has one level of dual tensors."""
    x, v = made(SHAPE, SHAPE)
    names = ("conv", "group norm", "mean")

    def run():
        split, slope = (lightning_shard.shard(t, mesh_of(3), 2) for t in (x, v))
        with pytest.raises(UnsupportedOperationError, match=r"call torch\.func\.jvp instead"):
            dual(torch.sin, split, slope)
        found = [jvp(FUNCTIONS[name], (split,), (slope,)) for name in names]
        found.append((grad(lambda t: t.sin().sum())(split),))
        return [[lightning_shard.gather(t).detach() for t in pair] for pair in found]

    expected = [jvp(FUNCTIONS[name], (x,), (v,)) for name in names] + [(x.cos(),)]
    for found in lightning_shard.simulate(run, processes=3):
        same(found, expected)


@pytest.mark.spmd(2)
def test_what_is_refused_and_the_ways_out():
    x, v = made((3, 4), (3, 4))
    split, slope = (lightning_shard.shard(t, mesh_of(2), 1) for t in (x, v))
    same(vmap(torch.sin, in_dims=1)(lightning_shard.gather(split)), vmap(torch.sin, in_dims=1)(x))

    class Allowed(Cube):
        pass

    lightning_shard.allow_function(Allowed)
    with pytest.raises(UnsupportedOperationError, match=r"take torch.autograd.functional.jvp"):
        jvp(Allowed.apply, (split,), (slope,))
    with pytest.raises(UnsupportedOperationError, match=r"inside of an autograd.Function"):
        jvp(Cube.apply, (split,), (slope,))
    found = torch.autograd.functional.jvp(Allowed.apply, split, slope)
    same(found, (x**3, 3 * x**2 * v))
    with pytest.raises(RuntimeError, match="a tangent has the shape of its tensor"):
        jvp(torch.sin, (split,), (slope[:1],))


@pytest.mark.spmd(2)
def test_no_graph_is_left_behind():
    x, w = made((3, 4), (4,))
    split = lightning_shard.shard(x, mesh_of(2), 1)
    assert not grad(lambda t: t.square().sum())(split).requires_grad
    weight = w.clone().requires_grad_()
    assert grad(lambda t: (t * weight).square().sum())(split).requires_grad
    with torch.no_grad():
        assert not grad(lambda t: (t * weight).square().sum())(split).requires_grad
    assert not grad(lambda t: t.square().sum())(w).requires_grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.last, self.times = nn.Conv2d(4, 2, 3, padding=1), nn.Linear(2, 4)

    def forward(self, z, r, t):
        h = self.norm(self.first(z)) + self.times(torch.stack([r, t], 1))[..., None, None]
        return self.last(F.silu(h))


def mean_flow(net, x, noise, r, t, *, whole=False):
    """The loss of MeanFlow (Geng et al., 2025), equation 9; `whole` keeps the target's graph."""
    mix = t[:, None, None, None]
    z, v = (1 - mix) * x + mix * noise, noise - x
    u, slope = jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None, None] * slope
    return (u - (target if whole else target.detach())).square().mean()


@pytest.mark.spmd(3)
def test_gradients_of_a_mean_flow_loss():
    check_mean_flow((3,))


def check_mean_flow(mesh):
    x, noise = made((2, 2, 7, 3), (2, 2, 7, 3))
    r, t = torch.tensor([[0.1, 0.2], [0.5, 0.9]], dtype=torch.float64)
    for whole in (False, True):
        torch.manual_seed(0)
        net, ends = Net().double(), []
        for place in (lambda t: t, lambda t: lightning_shard.shard(t, grid(mesh), 2)):
            net.zero_grad()
            loss = mean_flow(net, place(x), place(noise), r, t, whole=whole)
            loss.backward()
            ends.append([loss, *(p.grad for p in net.parameters())])
        mean_over(mesh, ends[1][1:])
        same(ends[1], ends[0])


def mapped(split, weights):
    """Transforms that map over gradients, of the split tensor or of a closure over it."""

    def loss(t):
        return (t.sin() * weights[:, None]).square().mean()

    def of_weights(w):
        return (split * w[:, None]).sin().mean((-3, -1))

    def both(w, x):
        return (x * w[:, None]).sin().mean((-2, -1))

    return {
        "vmap": lambda: vmap(torch.cumsum, in_dims=(0, None))(split, 0),
        "vmap over the split dim": lambda: vmap(torch.sin, in_dims=2)(split),
        "vmap of a scaled sum": lambda: vmap(lambda t, u: torch.add(t, u, alpha=2))(split, split),
        "vmap of a closure": lambda: vmap(lambda s: (split * s).sum())(weights),
        "gradients of samples": lambda: vmap(grad(lambda w, x: both(w, x).sum()), (None, 0))(
            weights, split
        ),
        "vmap of jvp": lambda: vmap(lambda t: jvp(torch.sin, (t,), (t,))[1])(split),
        "jacfwd": lambda: jacfwd(torch.sin)(split),
        "jacrev": lambda: jacrev(torch.sin)(split),
        "jacfwd of a closure": lambda: jacfwd(of_weights)(weights),
        "jacrev of a closure": lambda: jacrev(of_weights)(weights),
        "jacfwd twice": lambda: jacfwd(jacfwd(of_weights))(weights),
        "hessian": lambda: hessian(loss)(split),
        "hessian of a closure": lambda: hessian(lambda w: of_weights(w).sum())(weights),
        "another argument": lambda: jacfwd(both)(weights, split),
        "another argument of vmap": lambda: vmap(jacrev(both), (None, 0))(weights, split),
        "linearize": lambda: torch.func.linearize(torch.sin, split),
        "linearize of a closure": lambda: torch.func.linearize(of_weights, weights),
        "batched gradients": lambda: torch.autograd.functional.jacobian(
            torch.sin, split, vectorize=True
        ),
    }


@pytest.mark.spmd(2)
def test_what_maps_over_gradients_is_refused():
    """None of them passes: torch's own levels hide a split tensor from the rules."""
    x, weights = made(SHAPE, SHAPE[1:2])
    split = lightning_shard.shard(x.flatten(2), mesh_of(2), 2)
    words = r"torch\.stack what|torch\.func\.jvp|gather explicitly"
    for call in mapped(split, weights).values():
        with pytest.raises(UnsupportedOperationError, match=words):
            call()
    same(vmap(lambda t, u: t + u)(split, split), 2 * x.flatten(2))  # a sum is one of its parts
