"""Random numbers are independent on each part of a tensor, and alike on the ranks that hold it.

One seed is drawn from the default generator of the CPU (or from the generator given), so every rank
advances it equally and code that draws plain tensors stays in step. The numbers then come from a
generator of their own, seeded by that seed and the place of this rank's part.

Inside `with use_exact_random():` they are those of one process: every rank draws the numbers of the
whole tensor, in the order of its memory, and keeps its part. Where that order is not known and
some rank has one row of a dim, it draws them row by row.

What backward computes again, as `torch.utils.checkpoint` does, draws as the forward pass did: the
generators are in the same state again, and the mode of each draw is known by that state.
"""

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import common_layout, gathered, local_part, take_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements
from lightning_shard.processes.torch_private.internals import backward_pass

Operand = Subdomain | Tensor

_SPREAD = 0x9E3779B97F4A7C15  # odd, so places give different seeds modulo 2 ** 64


Draw = Callable[[Tensor, torch.Generator | None], Any]

# variables of the process, not ContextVars: backward, which may draw again, runs in threads that
# inherit no context
_blocks: list["_Block"] = []  # that are entered and not left; those of several threads may overlap
_exact = False  # outside of all blocks
# a hash of the state of the generators before a draw of the forward pass -> whether it was exact
_drawn_exactly: dict[int, bool] = {}
PROCESS_STATE = {  # each process has its own
    "_blocks": _blocks, "_exact": _exact, "_drawn_exactly": _drawn_exactly,
}  # fmt: skip
_MOST_DRAWS = 2**17  # forgotten are the first ones


class _Block:
    """One `with use_exact_random(mode):`."""

    def __init__(self, mode: bool) -> None:
        self.mode = mode


class use_exact_random:  # noqa: N801 - read as a function
    """Choose, inside a `with` block, whether random numbers equal those of one process.

    By default each rank draws for its own part of a split tensor, reproducibly from the seed, but
    other numbers than one process. In exact mode dropout, `rand_like`, `normal_` and the like draw
    the numbers that one process draws from the same state of the generator, which all ranks of a
    domain must share. That takes the time and the memory of the whole tensor's random numbers on
    each rank, and gathers the tensors whose elements are probabilities, rates or means
    (`torch.bernoulli`, `torch.normal`).

    The mode holds for the whole process, in all its threads, and is what it was before once the
    block ends. What was drawn inside and is computed again in backward, after the block, is drawn
    as it was. A call without `with` sets the mode for good; that is deprecated.

    Args:
        mode: True to draw the numbers of one process.

    Example:
        >>> with lightning_shard.use_exact_random():
        ...     loss = model(x).square().mean()
    """

    def __init__(self, mode: bool = True) -> None:
        self.mode = mode
        self._entered: list[_Block] | None = None  # None: no block was ever entered

    def __enter__(self) -> None:
        if self._entered is None:
            self._entered = []
        self._entered.append(_Block(self.mode))
        _blocks.append(self._entered[-1])

    def __exit__(self, *_: object) -> None:
        assert self._entered
        _blocks.remove(self._entered.pop())

    def __del__(self) -> None:
        global _exact
        if self._entered is None:
            _exact = self.mode
            warnings.warn(
                "use_exact_random(mode) as a statement sets the mode for the rest of the process; "
                "write `with use_exact_random(mode):` instead.",
                DeprecationWarning,
                stacklevel=2,
            )


def is_exact() -> bool:
    """Return the mode of the block that was entered last, or that outside of all blocks."""
    for block in reversed(_blocks):
        return block.mode
    return _exact


def draws_exactly(x: Subdomain, generator: torch.Generator | None = None) -> bool:
    """Return whether the next numbers for `x` are those of one process, see `use_exact_random`."""
    return x.domain.decides(lambda: _mode_of_draw(generator, x.local.device))


def _mode_of_draw(generator: torch.Generator | None, device: torch.device) -> bool:
    """Return the mode of a draw in forward, and the same where backward draws once more."""
    if generator is not None:
        states = [generator.get_state()]
    else:
        states = [torch.get_rng_state()]
        if device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(device).get_rng_state(device))
    key = hash(tuple(state.numpy().tobytes() for state in states))
    if backward_pass() != -1:
        return _drawn_exactly.get(key, is_exact())
    _drawn_exactly.pop(key, None)
    _drawn_exactly[key] = is_exact()
    if len(_drawn_exactly) > _MOST_DRAWS:
        del _drawn_exactly[next(iter(_drawn_exactly))]
    return _drawn_exactly[key]


def own_generator(x: Subdomain, generator: torch.Generator | None = None) -> torch.Generator:
    """Make a generator for this rank's part of a tensor that is split as `x`."""
    if draws_exactly(x, generator):
        raise UnsupportedOperationError(
            "it has no random numbers equal to those of one process, as use_exact_random asks for"
        )
    return _generator_of_part(x, generator)


def _generator_of_part(x: Subdomain, generator: torch.Generator | None) -> torch.Generator:
    """Make the generator where it is known that numbers need not be those of one process."""
    device = torch.device("cpu") if generator is None else generator.device
    with alike(x, generator, device):
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
    place = x.layout.grid.index(x.layout.axes())
    return torch.Generator(x.local.device).manual_seed((seed + place * _SPREAD) % 2**63)


@contextlib.contextmanager
def own_random_state(x: Subdomain) -> Generator[None]:
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


def alike(
    x: Subdomain, generator: torch.Generator | None, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Return a context for a draw that all members of the domain of `x` make alike."""
    return x.domain.drawing(generator, device)


def drawn(x: Subdomain, draw: Draw, generator: torch.Generator | None = None) -> Tensor:
    """Draw this rank's part of the random numbers that `draw` writes into a tensor like `x`."""
    local = x.local.detach()
    if not draws_exactly(x, generator):
        result = torch.empty_like(local)
        draw(result, _generator_of_part(x, generator))
        return result
    whole = torch.empty_strided(x.shape, x.strides_shown, dtype=local.dtype, device=local.device)
    with alike(x, generator, local.device):
        draw(whole, generator)
    return take_part(whole, x.layout).clone(memory_format=torch.preserve_format)


_FILLS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.rand_like: Tensor.uniform_,
    torch.randn_like: Tensor.normal_,
}


@implements(*_FILLS)
def random_like(func: Callable[..., Tensor], x: Subdomain, **options: Any) -> Subdomain:
    """Draw random numbers of the shape and split of `x`; nothing travels."""
    return _new_numbers(x, _FILLS[func], **options)


@implements(torch.randint_like)
def randint_like(
    func: Callable[..., Tensor], x: Subdomain, *limits: int, **options: Any
) -> Subdomain:
    """`limits` are `high`, or `low` and `high`."""
    limits = limits or tuple(options.pop(k) for k in ("low", "high") if k in options)
    bounds = limits if len(limits) > 1 else (0, *limits)
    return _new_numbers(x, lambda t, **own: t.random_(*bounds, **own), **options)


def _new_numbers(
    x: Subdomain,
    fill: Callable[..., Tensor],
    *,
    generator: torch.Generator | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> Subdomain:
    like = x.alike(torch.empty_like(x.local, **options))
    result = drawn(like, lambda t, g: fill(t, generator=g), generator)
    return x.alike(result.requires_grad_(requires_grad))


@implements(Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, Tensor.random_,
            Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_)  # fmt: skip
def fill_randomly(
    func: Callable[..., Tensor],
    x: Subdomain,
    *args: Any,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Subdomain:
    """Fill this rank's part with random numbers in place; nothing travels."""
    if not draws_exactly(x, generator):
        args = tuple(local_part(a, x.layout) if _is_tensor(a) else a for a in args)
        return x.like(func(x.local, *args, **kwargs, generator=_generator_of_part(x, generator)))
    args = tuple(gathered(a) if isinstance(a, Subdomain) else a for a in args)
    numbers = drawn(x, lambda t, g: func(t, *args, **kwargs, generator=g), generator)
    return x.like(x.local.copy_(numbers))


@implements(torch.bernoulli, Tensor.bernoulli, torch.poisson)
def draw_elementwise(
    func: Callable[..., Tensor], x: Subdomain, *args: Any, generator: torch.Generator | None = None
) -> Subdomain:
    """Each element gives its own probability or rate."""
    return _elementwise(x.layout, [x], lambda t, g: func(t, *args, generator=g), generator)


@implements(torch.normal)
def normal(
    func: Callable[..., Tensor],
    mean: Operand | float,
    std: Operand | float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Subdomain:
    """Draw normal numbers with elementwise mean and deviation; nothing travels."""
    layout = common_layout([o for o in (mean, std) if _is_tensor(o)])
    return _elementwise(layout, [mean, std], lambda m, s, g: func(m, s, generator=g), generator)


@implements(F.rrelu, torch.rrelu)
def rrelu(
    func: Callable[..., Tensor],
    x: Subdomain,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Subdomain:
    """The slopes of negative elements are random; one process draws none for the others."""
    if training and draws_exactly(x):
        given = gathered(x)
        with alike(x, None, given.device):
            whole = torch.rrelu(given, lower, upper, True)
        numbers = take_part(whole, x.layout)
    elif training:
        slope = torch.empty_like(x.local).uniform_(
            lower, upper, generator=_generator_of_part(x, None)
        )
        numbers = x.local * torch.where(x.local < 0, slope, 1.0).to(x.dtype).detach()
    else:
        numbers = torch.rrelu(x.local, lower, upper)
    return x.like(x.local.copy_(numbers) if inplace else numbers)


@implements(torch.rrelu_)
def rrelu_in_place(
    func: Callable[..., Tensor],
    x: Subdomain,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> Subdomain:
    """Randomized leaky ReLU in place; nothing travels."""
    return rrelu(func, x, lower, upper, training, inplace=True)


def _elementwise(
    layout: Layout,
    operands: Sequence[Operand | float],
    draw: Callable[..., Tensor],
    generator: torch.Generator | None,
) -> Subdomain:
    """Random numbers whose distribution the elements of `operands` give."""
    first = next(o for o in operands if isinstance(o, Subdomain))
    if draws_exactly(first, generator):
        wholes = [gathered(o) if isinstance(o, Subdomain) else o for o in operands]
        with alike(first, generator, first.local.device):
            numbers = draw(*wholes, generator)
        return first.like(take_part(numbers, layout), layout)
    parts = [local_part(o, layout) if _is_tensor(o) else o for o in operands]
    own = _generator_of_part(first.like(first.local, layout), generator)
    return first.like(draw(*parts, own), layout)


def _is_tensor(value: Any) -> TypeGuard[Operand]:
    return isinstance(value, Subdomain | Tensor)
