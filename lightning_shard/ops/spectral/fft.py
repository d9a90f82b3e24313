"""Fourier transforms: a spectrum is computed only as far as it is read.

Such a lazy spectrum is in spectrum.py.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import gathered
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.masked_rows import global_rows
from lightning_shard.domain.subdomain import Seen, Subdomain
from lightning_shard.ops.autocast import cast_for
from lightning_shard.ops.become import BecameSplit, is_shared, shared_on_a_rank
from lightning_shard.ops.registry import implements, implements_lazily, name_of, rule_for
from lightning_shard.ops.spectral.canvas import (
    Canvas,
    Positions,
    Write,
    has_values,
    without_lost_graph,
)
from lightning_shard.ops.spectral.dft import scale
from lightning_shard.ops.spectral.spectrum import Spectrum, inverse
from lightning_shard.ops.view.assign import written_to_field
from lightning_shard.ops.view.entries import expanded_index
from lightning_shard.ops.view.index import getitem, take_rows
from lightning_shard.ops.view.shift import roll
from lightning_shard.processes.torch_private.typed import fft

Lazy = Spectrum | Canvas
LIMITS = "no modes assigned twice to a place, or to a part of a dim that is not transformed"


def _plan(
    x: Any, args: Sequence[Any], kwargs: dict[str, Any], rank: int | None
) -> tuple[Any, list[int], str | None]:
    """(sizes or None, dims, norm) of a torch.fft call of 1, 2 or n dims."""
    names = ("n", "dim", "norm") if rank == 1 else ("s", "dim", "norm")
    given = dict(zip(names, args, strict=False)) | kwargs
    if set(given) - set(names):
        raise UnsupportedOperationError(f"arguments {sorted(set(given) - set(names))} of torch.fft")
    sizes, dims = given.get(names[0]), given.get("dim")
    if isinstance(sizes, int):
        sizes = [sizes]
    if rank == 1:
        dims = -1 if dims is None else dims
    if isinstance(dims, int):
        dims = [dims]
    elif dims is None:
        last = 2 if rank == 2 else x.ndim if sizes is None else len(sizes)
        dims = list(range(-last, 0))
    return sizes, [d % x.ndim for d in dims], given.get("norm")


def _forward(
    func: Callable[..., Any],
    x: Subdomain,
    rank: int | None,
    one_sided: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    sizes, dims, norm = _plan(x, args, kwargs, rank)
    extents = tuple(
        x.shape[d] if sizes is None or sizes[i] == -1 else int(sizes[i]) for i, d in enumerate(dims)
    )
    frequencies: list[Positions] = [range(n) for n in extents]
    if one_sided:
        if x.dtype.is_complex:
            raise RuntimeError(f"{name_of(func)} expects a real input; got {x.dtype}")
        frequencies[-1] = range(extents[-1] // 2 + 1)
    factor = scale(norm, extents, forward=True)
    x = _without_rows_beyond(x, dims, extents)
    x = replace(x, local=without_lost_graph(x.local))
    shown, seen = _complex(x.dtype), Seen.of(x.local)
    return Spectrum(x, tuple(dims), extents, tuple(frequencies), factor, shown, seen)


def _without_rows_beyond(x: Subdomain, dims: Sequence[int], extents: Sequence[int]) -> Subdomain:
    """Set to zero the rows that a transform of `extents` leaves out: they may hold NaN."""
    for dim, extent in zip(dims, extents, strict=True):
        if extent < x.shape[dim]:
            rows = global_rows(x.layout.dims[dim], x.layout.grid, x.local.device)
            is_kept = (rows < extent).view(-1, *[1] * (x.ndim - dim - 1))
            x = x.like(torch.where(is_kept, x.local, 0))
    return x


def _backward(
    func: Callable[..., Any], x: Any, rank: int | None, one_sided: bool, *args: Any, **kwargs: Any
) -> Any:
    sizes, dims, norm = _plan(x, args, kwargs, rank)
    shape = [x.shape[d] for d in dims]
    if one_sided:
        shape[-1] = 2 * (shape[-1] - 1)
    extents = [n if sizes is None or sizes[i] == -1 else int(sizes[i]) for i, n in enumerate(shape)]
    if isinstance(x, Spectrum):
        x = x.read()
    if isinstance(x, Subdomain):
        x = x if x.dtype.is_complex else x.like(x.local.to(_complex(x.dtype)))
        writes = [Write(x, tuple(map(range, x.shape)), Seen.of(x.local))]
    else:
        writes = [_in_order(write, x.shape, dims) for write in x.written()]
    if not writes:
        raise UnsupportedOperationError("an inverse transform of a spectrum without modes")
    return inverse(writes, dims, extents, norm, one_sided)


def _in_order(write: Write, shape: Sequence[int], dims: Sequence[int]) -> Write:
    """The modes with other dims than `dims` whole and in order, as a transform leaves them."""
    modes, positions = write.modes, list(write.positions)
    for d, at in enumerate(positions):
        if d in dims or (len(at) == shape[d] and at in (range(shape[d]), tuple(range(shape[d])))):
            continue
        if len(at) < shape[d]:
            raise UnsupportedOperationError(
                "modes assigned to a part of a dim that is not transformed"
            )
        order = sorted(range(len(at)), key=at.__getitem__)
        modes = take_rows(modes, d, torch.tensor(order, device="cpu"))
        positions[d] = range(shape[d])
    return replace(write, modes=modes, positions=tuple(positions))


def _call(
    kind: Callable[..., Any],
    rank: int | None,
    one_sided: bool,
    func: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    x = args[0] if args else kwargs.pop("input")
    if isinstance(x, Subdomain):
        (x,) = cast_for(_sizes, x)
    return kind(func, x, rank, one_sided, *args[1:], **kwargs)


def _sizes(x: Tensor) -> Tensor:
    """Return real numbers of the type in which autocast transforms `x`; `x` if torch cannot."""
    try:
        return fft.fft(x).abs()
    except RuntimeError:  # bfloat16, which a transform of few modes serves
        return x


def _register() -> None:
    for name, rank in (("fft", 1), ("fft2", 2), ("fftn", None)):
        for prefix, kind, one_sided in (
            ("", _forward, False),
            ("r", _forward, True),
            ("i", _backward, False),
            ("ir", _backward, True),
        ):
            function = getattr(torch.fft, prefix + name)

            rule = functools.partial(_call, kind, rank, one_sided)
            implements(function, limits=LIMITS if kind is _backward else "")(rule)
            if kind is _backward:
                implements_lazily(function)(rule)


_register()


@implements_lazily(fft.fftshift, fft.ifftshift)
def lazy_shift(func: Callable[..., Any], x: Lazy, dim: Any = None) -> Lazy | Subdomain:
    """Transformed dims are shifted by their frequencies, and the others once they are read."""
    others: list[int] = []
    for d in _dims(x, dim):
        if isinstance(x, Spectrum) and d not in x.dims:
            others.append(d)
        else:
            x = x.moved_by({d: _rotation(func)})
    if isinstance(x, Spectrum):
        x.refuse_stale()
        x = replace(x, given=[])
    return shift(func, x.read(), others) if others else x


@implements(fft.fftshift, fft.ifftshift)
def shift(func: Callable[..., Any], x: Subdomain, dim: Any = None) -> Subdomain:
    """Shift along all transformed or named dims, as `roll` does; rows travel."""
    dims = _dims(x, dim)
    forward = func is fft.fftshift
    return roll(func, x, [x.shape[d] // 2 if forward else -(x.shape[d] // 2) for d in dims], dims)


@functools.cache
def _rotation(func: Callable[..., Any]) -> Callable[[Positions], Positions]:
    @functools.lru_cache(maxsize=512)
    def rotate(kept: Positions) -> Positions:
        n = len(kept)
        start = (n + 1) // 2 if func is fft.fftshift else n // 2
        return (*kept[start:], *kept[:start])

    return rotate


def _dims(x: Any, dim: Any) -> list[int]:
    chosen = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return [d % x.ndim for d in chosen]


@implements_lazily(Tensor.__getitem__)
def lazy_getitem(func: Callable[..., Any], x: Spectrum, index: Any) -> Any:
    """Slices along transformed dims choose frequencies; the modes are then computed."""
    slices: list[slice] = expanded_index(x.ndim, index)
    modes = x.moved_by({d: functools.partial(_chosen, slices[d]) for d in x.dims}).read()
    others = tuple(slice(None) if d in x.dims else e for d, e in enumerate(slices))
    if any(entry != slice(None) for entry in others):
        modes = getitem(func, modes, others)
    if x.strides is not None:
        steps = [step * (entry.step or 1) for step, entry in zip(x.strides, slices, strict=True)]
        modes = replace(modes, strides=tuple(steps))
    x.given.append(Seen.of(modes.local))
    return modes


def _chosen(entry: slice, kept: Positions) -> Positions:
    return kept[entry]


def is_served_lazily(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a function takes lazy spectra; for others all modes are computed before."""
    part = getattr(args[0], "_part", None) if args else None
    if func is Tensor.__getitem__:
        entries = expanded_index(args[0].ndim, args[1])
        return not isinstance(part, Canvas) and all(isinstance(entry, slice) for entry in entries)
    if func is Tensor.__setitem__ and isinstance(part, Canvas):
        return hasattr(args[2], "_part") and part.takes(args[1], args[2].shape)
    if func is Tensor.__setitem__ and isinstance(part, Spectrum):
        return False
    return rule_for(func, lazy=True) is not None


@implements_lazily(Tensor.__setitem__)
def lazy_setitem(func: Callable[..., Any], x: Any, index: Any, value: Any) -> Any:
    """A plain complex tensor of zeros becomes a canvas with its first modes.

    One that something else sees, as a view does, stays plain, and takes the modes of all ranks. One
    that is no canvas for them becomes an ordinary split tensor.
    """
    spectral = isinstance(x, Canvas) or (isinstance(x, Tensor) and x.is_complex())
    if not spectral or not isinstance(value, Subdomain | Spectrum):
        raise UnsupportedOperationError("assignment into the spectrum of a split tensor")
    if isinstance(x, Canvas):
        x.assign(index, value.read())
        return None
    modes = value.read()
    canvas = Canvas.of(tuple(x.shape), x.dtype, x.device)
    if x.requires_grad or not canvas.takes(index, modes.shape):
        return written_to_field(func, x, index, modes)
    # values of `torch.empty` may be zeros on one rank alone
    if modes.domain.any_says(lambda: is_shared(x) or has_values(x), modes.local.device):
        if not shared_on_a_rank(x, modes):
            return written_to_field(func, x, index, modes)
        func(x, index, gathered(modes))  # a view would see a part of the modes
        return None
    canvas.assign(index, modes)
    return BecameSplit(x, canvas)


@implements_lazily(Tensor.chalf, Tensor.to)
def lazy_convert(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert the modes that a spectrum computes; they travel when they are read."""
    if not isinstance(x, Spectrum):
        raise UnsupportedOperationError("conversion of a spectrum to which modes were assigned")
    modes = x.read()
    converted = func(modes.local, *args, **kwargs)
    if converted is modes.local:  # torch gives the spectrum itself
        x.given.append(Seen.of(converted))
    return modes.like(converted)


def _complex(dtype: torch.dtype) -> torch.dtype:
    wide = {torch.float64: torch.complex128, torch.float16: torch.complex32}
    return dtype if dtype.is_complex else wide.get(dtype, torch.complex64)
