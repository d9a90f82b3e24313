"""The rates of the cost rule (docs/spectral.md): products and FFTs of one dim, on one thread.

python -m benchmarks.spectral_rates
"""

import time
from collections.abc import Callable

import torch

from benchmarks.common import describe, table
from lightning_shard.ops.spectral.dft import Transform, analyse, synthesise

POINTS = 2**23


def nanoseconds(step: Callable[[], object], points: int) -> float:
    """The least processor time of five runs, per point."""
    times = []
    for _ in range(5):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return min(times) * 1e9 / points


def row_of(extent: int, kept: int, *, real: bool) -> list[str]:
    """There and back, by product and by FFT."""
    dtype = torch.float32 if real else torch.complex64
    x = torch.randn(POINTS // extent, extent, dtype=dtype)
    found = []
    for fft in (False, True):
        steps = ((1, Transform(extent, (0, extent), range(kept), fft)),)
        modes = analyse(x, steps)
        there = nanoseconds(lambda t=steps: analyse(x, t), x.numel())
        back = nanoseconds(lambda t=steps, z=modes: synthesise(z, t, real=real), x.numel())
        found += [f"{there:.1f} + {back:.1f}"]
    return [f"{extent}, {'real' if real else 'complex'}", str(kept), *found]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = [row_of(n, k, real=True) for n in (421, 1024) for k in (17, 33, 65, 129)]
    rows += [row_of(n, k, real=False) for n in (421, 1024) for k in (12, 32, 64, 128)]
    describe()
    table(["points", "kept", "product, ns per point", "FFT, ns per point"], rows)


if __name__ == "__main__":
    main()
