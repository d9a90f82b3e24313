"""Chooses in which order the dims of a field are transformed, and each by which method.

A dim of N rows over P ranks is transformed by a matrix product of the k kept frequencies, whose
partial sums are reduce-scattered over modes, or by an FFT, which needs whole rows: a split dim is
transposed with the others for it and back. What is truncated first makes the rest cheaper. The rule
adds up the time of every order and method in a model of the device, and takes the least. It uses
integers that all ranks share, so all ranks decide alike. Rates and their source: docs/spectral.md.
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from torch import Tensor

from lightning_shard.domain.cache import DEFAULT_LIMIT
from lightning_shard.domain.layout import partition
from lightning_shard.processes.device import Rates, device_of

Method = Literal["auto", "dft", "fft"]
Step = tuple[int, bool]  # the number of the transformed dim, and whether by an FFT

_METHOD: ContextVar[Method] = ContextVar("spectral_method", default="auto")


@contextmanager
def spectral_method(method: Method) -> Generator[None, None, None]:
    """Transform split tensors by this method inside the block; results are the same.

    Args:
        method: "dft": matrix products of the kept frequencies; "fft": FFTs, for which split dims
            are transposed; "auto": for each dim the cheaper one, as docs/spectral.md says.

    Raises:
        ValueError: Another name.
    """
    if method not in get_args(Method):
        raise ValueError(f"spectral_method must be one of {get_args(Method)}; got {method!r}.")
    token = _METHOD.set(method)
    try:
        yield
    finally:
        _METHOD.reset(token)


def asked_method() -> Method:
    """Return the method of the innermost `spectral_method`; "auto" outside of any."""
    return _METHOD.get()


# Elements of a whole field below which FFTs of all frequencies are quicker than the choice of some:
# the host then takes longer than the device. Measured on a CPU and an H100 (docs/spectral.md).
FEW, FEW_ON_DEVICES = 2**18, 2**26


def is_small(x: Tensor) -> bool:
    """Return True for a whole field of which FFTs of all frequencies are quicker."""
    few = FEW if x.device.type == "cpu" else FEW_ON_DEVICES
    return asked_method() == "auto" and x.numel() < few


AWKWARD = 3.5  # times an FFT takes longer at extents with a prime factor above 13
FFT_CALLS = 3  # kernels of an FFT, back and forth: cut or filled with zeros, weighted, transformed
LARGEST_TABLE = DEFAULT_LIMIT // 4  # bytes; one that is larger may have to be made at each step
MAKING = 20  # times that making a table takes longer than reading it


@dataclass(frozen=True)
class Extent:
    """A dim to be transformed: `rows` of the field over `parts` ranks, `kept` of N frequencies."""

    points: int
    rows: int
    kept: int
    parts: int


def plan(
    extents: tuple[Extent, ...], others: int, real_bytes: int, real: bool, device: str
) -> tuple[Step, ...]:
    """Choose the steps from field to modes, in order; back they are taken in reverse.

    Args:
        extents: The transformed dims.
        others: The number of elements along all other dims, on this rank.
        real_bytes: Bytes of a real number.
        real: True if the field is real.
        device: Its type.
    """
    rates, method = device_of(device).rates, asked_method()
    methods = [
        (False,) if method == "dft" or not e.kept else (True,) if method == "fft" else (False, True)
        for e in extents
    ]
    natural = range(len(extents) - 1, -1, -1)  # the last dim first: of a real field it is one-sided
    candidates = (
        tuple(zip(order, (chosen[i] for i in order), strict=True))
        for chosen in itertools.product(*methods)
        for order in itertools.permutations(natural)
    )
    return min(candidates, key=lambda steps: _cost(steps, extents, others, real_bytes, real, rates))


def _cost(
    steps: tuple[Step, ...],
    extents: tuple[Extent, ...],
    others: int,
    real_bytes: int,
    real: bool,
    rates: Rates,
) -> float:
    sizes = [_largest(e.rows, e.parts) for e in extents]
    width = real_bytes if real else 2 * real_bytes
    total = 0.0
    unsummed: list[int] = []

    def volume() -> int:
        count = others
        for size in sizes:
            count *= size
        return count

    def sent(parts: int) -> float:
        return rates.send * volume() * width * (parts - 1) / parts + rates.start

    for i, fft in steps:
        e = extents[i]
        if fft:
            work = rates.fft * (AWKWARD if _awkward(e.points) else 1.0)
            total += volume() * width * (work + 2 * rates.touch * (e.parts > 1))
            total += FFT_CALLS * rates.call
            total += sent(e.parts) if e.parts > 1 else 0.0
            sizes[i], width = _largest(e.kept, e.parts), 2 * real_bytes
            total += sent(e.parts) if e.parts > 1 else 0.0
        else:
            flops = (4 if width == real_bytes else 8) * e.kept
            table = e.kept * sizes[i] * 2 * real_bytes
            read = rates.touch * table * (1 if table <= LARGEST_TABLE else MAKING)
            total += volume() * (rates.flop * flops + rates.touch * width) + read + rates.call
            sizes[i], width = e.kept, 2 * real_bytes
            unsummed += [i] if e.parts > 1 else []
    for i in unsummed:
        total += sent(extents[i].parts)
        sizes[i] = _largest(extents[i].kept, extents[i].parts)
    return total


def _largest(extent: int, parts: int) -> int:
    return partition(extent, parts)[1]


@lru_cache(maxsize=1024)
def _awkward(extent: int) -> bool:
    for prime in (2, 3, 5, 7, 11, 13):
        while extent % prime == 0 and extent > 1:
            extent //= prime
    return extent > 1
