"""Random numbers of split tensors: independent on each part, alike on the ranks that hold it.

One seed is drawn from the default generator of the CPU (or from the generator given), so every rank
advances it equally and code that draws plain tensors stays in step. The numbers then come from a
generator of their own, seeded by that seed and the place of this rank's part.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain import Subdomain
from lightning_shard.ops.align import common_layout, local_part
from lightning_shard.ops.registry import implements

Operand = Subdomain | Tensor

_SPREAD = 0x9E3779B97F4A7C15  # odd, so places give different seeds modulo 2 ** 64
_ALPHA = 1.7580993408473766  # minus the value that a SELU saturates to
# dropout of whole channels: the number of dims of a batch; with fewer there is no batch dim
_BATCHED = {F.dropout1d: 3, F.dropout3d: 5}


def own_generator(
    x: Subdomain, dims: Sequence[int] | None = None, generator: torch.Generator | None = None
) -> torch.Generator:
    """A generator for this rank's part of a tensor with the dims `dims` of `x` (all if None)."""
    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    axes = x.layout.axes() if dims is None else x.layout.axes(*dims)
    place = x.layout.grid.index(axes)
    return torch.Generator(x.local.device).manual_seed((seed + place * _SPREAD) % 2**63)


@contextlib.contextmanager
def own_random_state(x: Subdomain) -> Iterator[None]:
    """Inside, the default generator of the device draws for this rank's part of `x`."""
    device = x.local.device
    own = own_generator(x)
    default = torch.default_generator
    if device.type != "cpu":
        default = torch.get_device_module(device).default_generators[device.index]
    state = default.get_state()
    default.manual_seed(own.initial_seed())
    try:
        yield
    finally:
        default.set_state(state)


@implements(F.dropout, torch.dropout, torch.dropout_)
def dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    inplace = inplace or func is torch.dropout_
    return _dropped(x, p, named.get("train", training), inplace, dims=range(x.ndim))


@implements(F.alpha_dropout, torch.alpha_dropout)
def alpha_dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    return _alpha_dropped(x, p, named.get("train", training), inplace, dims=range(x.ndim))


@implements(F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
def feature_dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    dims = range(2 if x.ndim >= _BATCHED.get(func, 0) else 1)
    return _dropped(x, p, named.get("train", training), inplace, dims=dims)


@implements(F.feature_alpha_dropout, torch.feature_alpha_dropout)
def feature_alpha_dropout(
    func: Callable[..., Tensor],
    x: Subdomain,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
    **named: bool,
) -> Subdomain:
    return _alpha_dropped(x, p, named.get("train", training), inplace, dims=range(2))


def _dropped(x: Subdomain, p: float, training: bool, inplace: bool, *, dims: range) -> Subdomain:
    _check_probability(p)
    if not training or p == 0:
        return x if inplace else x.like(x.local.clone())
    factor = _kept(x, p, dims) / (1 - p if p < 1 else 1)
    return x.like(x.local.mul_(factor) if inplace else x.local * factor)


def _alpha_dropped(
    x: Subdomain, p: float, training: bool, inplace: bool, *, dims: range
) -> Subdomain:
    """Dropped elements get the value at which a SELU saturates; mean and variance are kept."""
    _check_probability(p)
    if not training or p == 0:
        return x if inplace else x.like(x.local.clone())
    kept = _kept(x, p, dims)
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    shift = (kept - 1) * (_ALPHA * scale) + _ALPHA * scale * p
    factor = kept * scale
    return x.like(x.local.mul_(factor).add_(shift) if inplace else x.local * factor + shift)


def _kept(x: Subdomain, p: float, dims: range) -> Tensor:
    """One for what is kept, zero for what is dropped; one number for all dims after `dims`."""
    shape = [n if d in dims else 1 for d, n in enumerate(x.local.shape)]
    return x.local.new_empty(shape).detach().bernoulli_(1 - p, generator=own_generator(x, dims))


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


@implements(torch.rand_like, torch.randn_like, torch.randint_like)
def random_like(
    func: Callable[..., Tensor],
    x: Subdomain,
    *limits: int,
    generator: torch.Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Subdomain:
    limits = limits or tuple(options.pop(k) for k in ("low", "high") if k in options)
    result = torch.empty_like(x.local, **options)
    draw = {"rand_like": result.uniform_, "randn_like": result.normal_}.get(func.__name__)
    own = own_generator(x, None, generator)
    if draw:
        draw(generator=own)
    else:
        result.random_(*(limits if len(limits) > 1 else (0, *limits)), generator=own)
    return x.like(result.requires_grad_(requires_grad))


@implements(Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, Tensor.random_,
            Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_)  # fmt: skip
def fill_randomly(
    func: Callable[..., Tensor],
    x: Subdomain,
    *args: Any,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Subdomain:
    own = own_generator(x, None, generator)
    args = tuple(local_part(a, x.layout) if isinstance(a, Subdomain | Tensor) else a for a in args)
    return x.like(func(x.local, *args, **kwargs, generator=own))


@implements(torch.bernoulli, Tensor.bernoulli, torch.poisson)
def draw_elementwise(
    func: Callable[..., Tensor], x: Subdomain, *args: Any, generator: torch.Generator | None = None
) -> Subdomain:
    """Each element gives its own probability or rate."""
    return x.like(func(x.local, *args, generator=own_generator(x, None, generator)))


@implements(torch.normal)
def normal(
    func: Callable[..., Tensor],
    mean: Operand | float,
    std: Operand | float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Subdomain:
    operands = [o for o in (mean, std) if isinstance(o, Subdomain | Tensor)]
    layout = common_layout(operands)
    first = next(o for o in operands if isinstance(o, Subdomain))
    x = first.like(first.local, layout)
    center, spread = (
        local_part(o, layout) if isinstance(o, Subdomain | Tensor) else o for o in (mean, std)
    )
    noise = first.local.new_empty(layout.local_shape).normal_(
        generator=own_generator(x, None, generator)
    )
    return first.like(center + spread * noise, layout)


@implements(F.rrelu, torch.rrelu, torch.rrelu_)
def rrelu(
    func: Callable[..., Tensor],
    x: Subdomain,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Subdomain:
    slope: Tensor | float = (lower + upper) / 2
    if training:
        slope = torch.empty_like(x.local).uniform_(lower, upper, generator=own_generator(x))
    factor = torch.where(x.local < 0, slope, 1.0).to(x.dtype)
    in_place = inplace or func is torch.rrelu_
    return x.like(x.local.mul_(factor.detach()) if in_place else x.local * factor.detach())
