"""The error of one spectral convolution in reduced precision: neuraloperator's own, and ours split.

    python -m benchmarks.spectral_precision

Relative L2 errors against float64, of white noise, 32 modes, split over 2 ranks.
"""

import copy
from collections.abc import Callable

import torch
from neuralop.layers.spectral_convolution import SpectralConv
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.common import describe, start, table
from tests.double_fno import to_double

EXTENTS = (64, 421)
CASES = ("float32", "autocast bfloat16", "autocast float16", "bfloat16 input", "half", "mixed")


def errors() -> list[list[str]]:
    """A row for each case: for each extent the error of one process and ours."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    return [[case, *(e for n in EXTENTS for e in _errors(case, n, mesh))] for case in CASES]


def _errors(case: str, extent: int, mesh: DeviceMesh) -> list[str]:
    torch.manual_seed(3)
    layer = SpectralConv(8, 8, n_modes=(32, 32))
    x = torch.randn(1, 8, extent, extent)
    wanted = to_double(copy.deepcopy(layer))(x.double()).detach()
    x = x.bfloat16() if case == "bfloat16 input" else x
    layer.fno_block_precision = case if case in ("half", "mixed") else "full"
    dtype = getattr(torch, case.rpartition(" ")[2]) if "autocast" in case else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled="autocast" in case):
        split = lightning_shard.shard(x, mesh, 2)
        return [
            _error(lambda: layer(x), wanted),
            _error(lambda: lightning_shard.gather(layer(split)), wanted),
        ]


def _error(run: Callable[[], Tensor], wanted: Tensor) -> str:
    try:
        found = run().detach().double()
    except RuntimeError:
        return "fails"
    return f"{((found - wanted).norm() / wanted.norm()).item():.1e}"


def main() -> None:
    """Print the table."""
    rows = start(2, errors)
    describe()
    head = [f"{n}², {who}" for n in EXTENTS for who in ("one process", "split")]
    table(["precision", *head], rows)


if __name__ == "__main__":
    main()
