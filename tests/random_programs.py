"""Programs of random functions of tensors, as a user might chain them.

A program begins with a tensor of small random extents. Each step is a function that a generator
chooses, with arguments that fit the shape at that place.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[Tensor], Tensor]
MOST = 20000  # elements


class Draw:
    """Arguments for a tensor of a shape.

    Attributes:
        dim: One of its dims, of `size`.
        order: All dims, permuted.
        rows: An index of some rows of the dim.
        place: An index into the dim, maybe negative.
        places: An index for each row of the dim.
        count: A number of rows, from 1.
        divisor: A divisor of the size.
        shift: A number of rows, maybe negative.
        pads: Rows that each side of each dim gains or loses.
    """

    def __init__(self, generator: random.Random, shape: tuple[int, ...]) -> None:
        self.dim = generator.randrange(len(shape))
        self.size = size = shape[self.dim]
        self.order = generator.sample(range(len(shape)), len(shape))
        low = generator.randrange(size)
        rows = slice(low, generator.randint(low, size), generator.randint(1, 3))
        self.rows = tuple(rows if d == self.dim else slice(None) for d in range(len(shape)))
        self.place = generator.randrange(-size, size)
        self.places = torch.tensor([generator.randrange(size) for _ in range(size)])
        self.count = generator.randint(1, size)
        self.divisor = generator.choice([n for n in range(1, size + 1) if size % n == 0])
        self.shift = generator.randint(-7, 7)
        self.pads = [generator.randint(-1, 2) for _ in range(2 * len(shape))]


def _assigned(index: Callable[[Tensor], object], value: Callable[[Tensor], Tensor | float]) -> Step:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y[index(x)] = value(x)
        return y

    return step


def _through_view(x: Tensor) -> Tensor:
    y = x.contiguous().clone()
    flat = y.flatten()
    flat[::2] = 0.25
    return y + flat.reshape(y.shape)


def _through_transposed(dim: int) -> Step:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y.transpose(0, dim).add_(1).mul_(0.5)
        return y

    return step


def _in_order(x: Tensor) -> Tensor:
    """Rows in the order of their sums, which are rounded so that ties are ties everywhere."""
    sums = x.flatten(1).sum(1) if x.ndim > 1 else x
    return x[sums.detach().round(decimals=6).argsort(stable=True)]


def _by_value(x: Tensor) -> Tensor:
    values, inverse = (2 * x).round().detach().unique(return_inverse=True)
    sums = torch.zeros(len(values), dtype=x.dtype)
    return sums.index_add(0, inverse.flatten(), x.flatten())


def _order(x: Tensor, dim: int) -> Tensor:
    return x.detach().argsort(dim=dim, stable=True)


STEPS: dict[str, Callable[[Draw], Step]] = {
    "relu": lambda _: torch.relu,
    "gelu": lambda _: F.gelu,
    "in place": lambda _: lambda x: (1 * x).sin_(),
    "permute": lambda draw: lambda x: x.permute(draw.order),
    "transpose": lambda draw: lambda x: x.transpose(0, draw.dim),
    "flatten": lambda draw: lambda x: x.flatten(draw.dim),
    "unflatten": lambda draw: lambda x: x.unflatten(draw.dim, (draw.divisor, -1)),
    "slice": lambda draw: lambda x: x[draw.rows],
    "select": lambda draw: lambda x: x.select(draw.dim, draw.place),
    "cat": lambda draw: lambda x: torch.cat([x, 2 * x, x.flip(draw.dim)], draw.dim),
    "stack": lambda draw: lambda x: torch.stack([x, x.sin()], draw.dim),
    "roll": lambda draw: lambda x: x.roll(draw.shift, draw.dim),
    "flip": lambda draw: lambda x: x.flip(draw.dim),
    "mask": lambda _: lambda x: x[x > 0.4],
    "rows by mask": lambda _: lambda x: x[x.flatten(1).mean(1) > -0.3] if x.ndim > 1 else x[x > 0],
    "nonzero": lambda _: lambda x: x[(x > 0.1).nonzero(as_tuple=True)],
    "where": lambda _: lambda x: torch.where(x > 0.3, x, 0.1 * x),
    "masked_fill": lambda _: lambda x: x.masked_fill(x < 0, 0.5),
    "assign by mask": lambda _: _assigned(lambda x: x > 0.2, lambda _: 0.7),
    "assign rows": lambda draw: _assigned(
        lambda _: draw.rows, lambda x: 3 * x[draw.rows].flip(draw.dim)
    ),
    "write through a view": lambda _: _through_view,
    "write transposed": lambda draw: _through_transposed(draw.dim),
    "sort": lambda draw: lambda x: x.sort(draw.dim)[0],
    "topk": lambda draw: lambda x: x.topk(draw.count, draw.dim)[0],
    "in order": lambda _: _in_order,
    "median": lambda _: lambda x: x - x.median(),
    "by value": lambda _: _by_value,
    "cumsum": lambda draw: lambda x: x.cumsum(draw.dim),
    "softmax": lambda draw: lambda x: x.softmax(draw.dim),
    "index_select": lambda draw: lambda x: x.index_select(draw.dim, draw.places),
    "gather": lambda draw: lambda x: x.gather(draw.dim, _order(x, draw.dim)),
    "scatter_add": lambda draw: (
        lambda x: torch.zeros_like(x).scatter_add(draw.dim, _order(x, draw.dim).flip(draw.dim), x)
    ),
    "index_add": lambda draw: lambda x: torch.zeros_like(x).index_add(draw.dim, draw.places, x),
    "mean": lambda draw: lambda x: x.mean(draw.dim),
    "amax": lambda draw: lambda x: x.amax(draw.dim, keepdim=True),
    "centred": lambda draw: lambda x: x - x.mean(draw.dim, keepdim=True),
    "layer norm": lambda _: lambda x: F.layer_norm(x, x.shape[-1:]),
    "expand": lambda _: lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "repeat_interleave": lambda draw: lambda x: x.repeat_interleave(2, draw.dim),
    "pad": lambda draw: lambda x: F.pad(x, draw.pads),
    "chunk": lambda draw: (
        lambda x: torch.cat(
            [(i + 1) * part for i, part in enumerate(x.chunk(draw.count, draw.dim))][::-1],
            draw.dim,
        )
    ),
    "unfold": lambda draw: lambda x: x.unfold(draw.dim, draw.count, 2),
    "matmul": lambda draw: lambda x: x @ torch.ones(x.shape[-1], 3, dtype=x.dtype).tril(),
    "outer": lambda _: lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1),
    "diff": lambda draw: lambda x: x.diff(dim=draw.dim),
    "einsum": lambda _: lambda x: torch.einsum("...i,...i->...", x, x.cos()),
    "squeeze": lambda _: lambda x: x.squeeze(),
    "meets itself permuted": lambda draw: lambda x: x + x.permute(draw.order).reshape(x.shape),
    "meets itself rolled": lambda draw: (
        lambda x: x * x.flatten().roll(draw.shift).reshape(x.shape).cos()
    ),
    "meets its sums": lambda draw: (
        lambda x: torch.cat(
            [x.flatten(draw.dim), x.sum(draw.dim).unsqueeze(-1).flatten(draw.dim)], -1
        )
    ),
    "meets a line": lambda draw: lambda x: x.flatten() + x.flatten(draw.dim).sum(0).mean(),
    "where meets": lambda draw: (
        lambda x: torch.where(x.permute(draw.order).reshape(x.shape) > 0, x, x.flip(draw.dim))
    ),
}

# functions of which torch gives a view of some tensors
VIEWS: dict[str, Callable[[Draw], Step]] = {
    "narrow": lambda draw: lambda x: x.narrow(draw.dim, 0, draw.count),
    "movedim": lambda draw: lambda x: x.movedim(draw.dim, 0),
    "rows": lambda draw: lambda x: x[draw.rows],
    "first part": lambda draw: lambda x: x.split(draw.count, draw.dim)[0],
    "last part": lambda draw: lambda x: x.chunk(draw.count, draw.dim)[-1],
    "row": lambda draw: lambda x: x.unbind(draw.dim)[draw.place],
    "transpose": lambda draw: lambda x: x.transpose(-1, draw.dim),
    "flatten": lambda draw: lambda x: x.flatten(draw.dim),
    "ravel": lambda _: lambda x: x.ravel(),
    "unflatten": lambda draw: lambda x: x.unflatten(draw.dim, (draw.divisor, -1)),
    "unsqueeze": lambda draw: lambda x: x.unsqueeze(draw.dim),
    "squeeze": lambda draw: lambda x: x.squeeze(draw.dim),
    "reshape": lambda _: lambda x: x.reshape(tuple(reversed(x.shape))),
    "turned": lambda draw: lambda x: x.permute(draw.order).reshape(x.shape),
    "contiguous": lambda draw: lambda x: x.permute(draw.order).contiguous(),
    "unfold": lambda draw: lambda x: x.unfold(draw.dim, draw.count, draw.count),
    "every second": lambda _: lambda x: x.flatten()[::2],
    "detach": lambda _: lambda x: x.detach(),
}
FUNCTIONS = STEPS | VIEWS


@dataclass(frozen=True)
class Program:
    """A tensor and the steps that follow, with their names; `split` is the dim to be split."""

    start: Tensor
    split: int
    names: list[str]
    steps: list[Step]


def program(seed: int) -> Program:
    """The program of a seed; it runs on whole tensors."""
    generator = random.Random(seed)
    shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
    start = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    names, steps, value = list[str](), list[Step](), start
    for _ in range(generator.randint(2, 6)):
        if value.ndim == 0 or not 0 < value.numel() < MOST:
            break
        name = generator.choice(list(STEPS))
        step = STEPS[name](Draw(generator, tuple(value.shape)))
        try:
            value = step(value)
        except (RuntimeError, IndexError):  # not for this shape
            continue
        names.append(name)
        steps.append(step)
    return Program(start, generator.randrange(len(shape)), names, steps)
