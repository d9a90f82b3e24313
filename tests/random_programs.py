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
from torch.utils.checkpoint import checkpoint

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


def _image(x: Tensor) -> Tensor:
    """The last two dims as those of an image, all others as its channels: (1, C, H, W)."""
    return x.reshape(1, -1, *x.shape[-2:])


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def _numbers(*shape: int) -> Tensor:
    """Weights of a layer."""
    count = torch.Size(shape).numel()
    return torch.linspace(-0.6, 0.9, count, dtype=torch.float64).reshape(shape)


def _conv(draw: Draw) -> Step:
    stride, kernel, dilation = 1 + draw.count % 2, 1 + draw.size % 3, 1 + draw.dim % 2
    return lambda x: F.conv2d(
        _image(x), _numbers(2, _image(x).shape[1], kernel, kernel), _numbers(2), stride, kernel,
        dilation,
    )  # fmt: skip


def _transposed(draw: Draw) -> Step:
    stride, kernel = 1 + draw.count % 2, 1 + draw.size % 3
    return lambda x: F.conv_transpose2d(
        _image(x), _numbers(_image(x).shape[1], 2, kernel, kernel), None, stride
    )


def _classes(x: Tensor) -> Tensor:
    return F.cross_entropy(_matrix(x), _matrix(x).detach().argmin(1), reduction="none")


def _written_rows(draw: Draw) -> Step:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y.select(draw.dim, draw.place).mul_(2)
        y += y.mean(draw.dim, keepdim=True)
        return y

    return step


# functions of layers, spectra, sums and indices, which the other steps lack
MORE: dict[str, Callable[[Draw], Step]] = {
    "conv": _conv,
    "transposed conv": _transposed,
    "depthwise": lambda draw: (
        lambda x: F.conv1d(
            x.reshape(1, -1, x.shape[-1]),
            _numbers(x.numel() // x.shape[-1], 1, 3),
            padding=1,
            groups=x.numel() // x.shape[-1],
        )
    ),
    "max pool": lambda draw: lambda x: F.max_pool2d(_image(x), draw.count, 1 + draw.dim),
    "mean pool": lambda draw: lambda x: F.avg_pool2d(_image(x), draw.count, 2, draw.count // 2),
    "adaptive pool": lambda draw: lambda x: F.adaptive_avg_pool2d(_image(x), (draw.count, 2)),
    "resize": lambda draw: lambda x: F.interpolate(_image(x), size=(draw.size + 1, draw.count)),
    "bilinear": lambda draw: (
        lambda x: F.interpolate(
            _image(x),
            size=(draw.size + 2, draw.count),
            mode="bilinear",
            align_corners=draw.dim == 0,
        )
    ),
    "patches": lambda draw: lambda x: F.unfold(_image(x), draw.count, padding=1),
    "reflected": lambda draw: lambda x: F.pad(_image(x), (1, 1, 1, 1), mode="reflect"),
    "circular": lambda draw: lambda x: F.pad(_image(x), (1, 0, 1, 1), mode="circular"),
    "attention": lambda draw: (
        lambda x: F.scaled_dot_product_attention(_image(x), _image(x).flip(2), _image(x).sin())
    ),
    "group norm": lambda _: lambda x: F.group_norm(_image(x), 1),
    "instance norm": lambda _: lambda x: F.instance_norm(_image(x)),
    "batch norm": lambda _: lambda x: F.batch_norm(_image(x), None, None, training=True),
    "rms norm": lambda _: lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda draw: lambda x: F.normalize(x + 3, dim=draw.dim),
    "linear": lambda _: lambda x: F.linear(x, _numbers(4, x.shape[-1]), _numbers(4)),
    "warp": lambda draw: (
        lambda x: F.grid_sample(
            _image(x),
            _image(x).tanh().mean(1).unsqueeze(-1).expand(-1, -1, -1, 2),
            align_corners=draw.dim == 0,
        )
    ),
    "embedding": lambda _: (
        lambda x: F.embedding((2 * x.detach()).long().clamp(0, 3), _numbers(4, 2)) * x.unsqueeze(-1)
    ),
    "classes": lambda _: _classes,
    "huber": lambda draw: lambda x: F.huber_loss(x, x.flip(draw.dim) + 0.1, reduction="none"),
    "glu": lambda draw: lambda x: F.glu(x, draw.dim),
    "fft": lambda draw: lambda x: torch.view_as_real(torch.fft.fft(x, dim=draw.dim)).sum(-1),
    "fft of all dims": lambda _: lambda x: torch.fft.fftn(x).real,
    "low frequencies": lambda draw: (
        lambda x: torch.fft.irfft(
            torch.fft.rfft(x, dim=draw.dim).narrow(draw.dim, 0, 1 + draw.size // 4),
            n=draw.size,
            dim=draw.dim,
        )
    ),
    "fftshift": lambda draw: lambda x: torch.fft.fftshift(x, draw.dim),
    "complex": lambda draw: lambda x: (torch.complex(x, x.flip(draw.dim)) ** 2).imag,
    "angle": lambda _: lambda x: torch.complex(x, 1 + x.square()).angle(),
    "cumprod": lambda draw: lambda x: x.clamp(0.5, 1.4).cumprod(draw.dim),
    "cummax": lambda draw: lambda x: x.cummax(draw.dim)[0],
    "logcumsumexp": lambda draw: lambda x: x.logcumsumexp(draw.dim),
    "logsumexp": lambda draw: lambda x: x.logsumexp(draw.dim),
    "log_softmax": lambda draw: lambda x: x.log_softmax(draw.dim),
    "std": lambda draw: lambda x: (x + x.sin().cumsum(draw.dim)).std(draw.dim, correction=0),
    "var_mean": lambda draw: lambda x: torch.stack(torch.var_mean(x, draw.dim, correction=0)),
    "p-norm": lambda draw: lambda x: torch.linalg.vector_norm(x, 3, draw.dim, keepdim=True) + x,
    "prod": lambda draw: lambda x: x.prod(draw.dim),
    "quantile": lambda draw: lambda x: x.quantile(0.3, draw.dim),
    "kthvalue": lambda draw: lambda x: x.kthvalue(draw.count, draw.dim)[0],
    "median of a dim": lambda draw: lambda x: x.median(draw.dim)[0],
    "max": lambda draw: lambda x: x.max(draw.dim)[0],
    "best index": lambda draw: (
        lambda x: x * F.one_hot(x.argmax(draw.dim), draw.size).movedim(-1, draw.dim)
    ),
    "trapezoid": lambda draw: lambda x: torch.trapezoid(x, dim=draw.dim),
    "differences": lambda draw: lambda x: torch.gradient(x, dim=draw.dim)[0],
    "cov": lambda _: lambda x: torch.cov(_matrix(x), correction=0),
    "distances": lambda _: lambda x: torch.cdist(_matrix(x), _matrix(x).flip(0) + 5),
    "kron": lambda _: lambda x: torch.kron(x, _numbers(2)),
    "contraction": lambda draw: lambda x: torch.tensordot(x, x.sin(), ([draw.dim], [draw.dim])),
    "gram": lambda _: lambda x: x @ x.sin().mT,
    "solve": lambda _: (
        lambda x: torch.linalg.solve(
            _matrix(x) @ _matrix(x).mT + 2 * torch.eye(x.shape[0], dtype=x.dtype), _matrix(x)
        )
    ),
    "triu": lambda draw: lambda x: x.triu(draw.shift % 3),
    "diagonal": lambda draw: lambda x: x.diagonal(0, 0, draw.dim),
    "diag_embed": lambda _: lambda x: x.diag_embed(),
    "block_diag": lambda _: lambda x: torch.block_diag(_matrix(x), _matrix(x).sin()),
    "rot90": lambda draw: lambda x: x.rot90(draw.shift, (0, draw.dim)),
    "tile": lambda draw: lambda x: x.tile(2, 1),
    "repeat": lambda draw: lambda x: x.repeat(*[1 + (d == draw.dim) for d in range(x.ndim)]),
    "take": lambda draw: lambda x: x.take(draw.places),
    "take_along_dim": lambda draw: (
        lambda x: x.take_along_dim(_order(x, draw.dim).flip(draw.dim), draw.dim)
    ),
    "masked_scatter": lambda draw: (
        lambda x: x.masked_scatter(x.detach().round(decimals=6) > 0, x.flip(draw.dim))
    ),
    "index_put": lambda draw: (
        lambda x: torch.zeros_like(x).index_put(
            (draw.places % x.shape[0],), x[draw.places % x.shape[0]], accumulate=True
        )
    ),
    "index_copy": lambda draw: (
        lambda x: x.index_copy(
            draw.dim, torch.tensor([draw.place % draw.size]), x.narrow(draw.dim, 0, 1).exp()
        )
    ),
    "select_scatter": lambda draw: (
        lambda x: x.select_scatter(x.mean(draw.dim), draw.dim, draw.place)
    ),
    "largest of each": lambda draw: (
        lambda x: x.scatter_reduce(draw.dim, _order(x, draw.dim), x.flip(draw.dim), "amax")
    ),
    "bucketize": lambda _: lambda x: x * torch.bucketize(x.detach(), _numbers(4)),
    "searchsorted": lambda _: (
        lambda x: x * torch.searchsorted(x.detach().flatten().sort()[0], x.detach())
    ),
    "lerp": lambda draw: lambda x: x.lerp(x.flip(draw.dim), 0.3),
    "clamp": lambda draw: lambda x: torch.clamp(x, max=x.flip(draw.dim) + 0.1),
    "similarity": lambda draw: lambda x: F.cosine_similarity(x + 2, x.flip(draw.dim) + 2, draw.dim),
    "less a row": lambda draw: lambda x: x - x.select(draw.dim, draw.place).unsqueeze(draw.dim),
    "written rows": _written_rows,
    "renorm": lambda draw: lambda x: x.renorm(2, draw.dim, 0.7),
    "tensor_split": lambda draw: (
        lambda x: torch.cat(x.tensor_split(draw.count, draw.dim)[::-1], draw.dim)
    ),
    "column_stack": lambda _: lambda x: torch.column_stack([x, x.cos()]),
    "unique": lambda _: lambda x: x.flatten() + x.detach().round().unique().sum(),
    "checkpoint": lambda _: (
        lambda x: checkpoint(lambda y: y.sin() * y.mean(), x, use_reentrant=False)
    ),
    "single precision": lambda _: lambda x: (8 * x).round().float().double() + x,
    "in rows of another order": lambda draw: (
        lambda x: torch.empty_strided(
            x.permute(draw.order).shape, x.permute(draw.order).contiguous().stride(), dtype=x.dtype
        ).copy_(x.permute(draw.order))
    ),
}


def _convolved(*ways: tuple[int | str, int]) -> Step:
    """One weight, convolved once for each pair of a padding and a dilation."""

    def step(x: Tensor) -> Tensor:
        y = _image(x)
        weight = _numbers(y.shape[1], y.shape[1], 3, 3)
        for padding, dilation in ways:
            y = F.conv2d(y, weight, _numbers(y.shape[1]), 1, padding, dilation).sin()
        return y

    return step


def _frozen(x: Tensor) -> Tensor:
    y = _image(x)
    if 1 in y.shape[2:]:  # torch's own gradient of one row is wrong where it lies in another order
        return y.sin()
    return F.batch_norm(y, _numbers(y.shape[1]), _numbers(y.shape[1]).exp())


def _added_to(draw: Draw) -> Step:
    def step(x: Tensor) -> Tensor:
        y = x.clone()
        y[draw.rows] += y.mean()
        return y

    return step


# sequences of layers: of equal windows, with one weight, and as the gradient lies in memory
LAYERS: dict[str, Callable[[Draw], Step]] = {
    "one padding in two ways": lambda _: _convolved((1, 1), ("same", 1), (1, 1)),
    "one weight in two ways": lambda _: _convolved((1, 1), ("same", 2), (0, 1)),
    "frozen norm": lambda _: _frozen,
    "frozen norm turned": lambda _: (
        lambda x: _frozen(x).transpose(1, 3) @ _numbers(_image(x).shape[1], 2)
    ),
    "norms": lambda _: (
        lambda x: F.group_norm(F.instance_norm(_image(x)) + _image(x).sin(), 1).sin()
    ),
    "response norm": lambda draw: lambda x: F.local_response_norm(_image(x), draw.count),
    "frames": lambda _: (
        lambda x: F.conv2d(
            x.reshape(-1, 1, *x.shape[-2:]), _numbers(2, 1, 3, 3), _numbers(2), padding=1
        )
    ),
    "added to rows": _added_to,
    "double U": lambda draw: (
        lambda x: torch.cat(
            [
                F.interpolate(F.avg_pool2d(_image(x), 2, ceil_mode=True), _image(x).shape[2:]),
                _image(x).flip(2),
            ],
            1,
        )
    ),
}


@dataclass(frozen=True)
class Program:
    """A tensor and the steps that follow, with their names; `split` is the dim to be split."""

    start: Tensor
    split: int
    names: list[str]
    steps: list[Step]


def program(seed: int, functions: dict[str, Callable[[Draw], Step]] = STEPS) -> Program:
    """The program of a seed; it runs on whole tensors."""
    generator = random.Random(seed)
    shape = [generator.randint(1, 6) for _ in range(generator.randint(1, 4))]
    start = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    names, steps, value = list[str](), list[Step](), start
    for _ in range(generator.randint(2, 6)):
        if value.ndim == 0 or not 0 < value.numel() < MOST:
            break
        name = generator.choice(list(functions))
        step = functions[name](Draw(generator, tuple(value.shape)))
        try:
            value = step(value)
        except (RuntimeError, IndexError, ValueError, AssertionError):  # not for this shape
            continue
        names.append(name)
        steps.append(step)
    return Program(start, generator.randrange(len(shape)), names, steps)
