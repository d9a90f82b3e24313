"""A training step of a U-Net on many ranks, simulated in one process, beside the same in one rank.

    python -m benchmarks.simulated_ranks --mesh 4 4 4 --resolution 256 --channels 32

Each replica of the first size of the mesh has a sample, which the others split along its rows, and
its columns where there are two more. Parameters are sharded by FSDP2 over all ranks. Everything is
float64. It prints the relative difference of the gradient, seconds, and the peak
memory of the process, in which all ranks and the step in one rank are.
"""

import argparse
import math
import resource
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lightning_shard
from benchmarks.common import describe, table
from benchmarks.unet_step import UNet


def compared(mesh: Sequence[int], resolution: int, channels: int) -> tuple[float, float]:
    """The relative difference of the gradient, and the seconds of the simulated step."""
    torch.manual_seed(0)
    net, samples = UNet(channels).double(), torch.randn(mesh[0], 3, resolution, resolution).double()
    begin = time.perf_counter()
    found = lightning_shard.simulate(_gradients, net, samples, mesh, processes=math.prod(mesh))[0]
    seconds = time.perf_counter() - begin
    net(samples).square().mean().backward()
    expected = {name: _grad(p) for name, p in net.named_parameters()}
    gap = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items())
    return (gap / sum(float(g.square().sum()) for g in expected.values())) ** 0.5, seconds


def _gradients(net: nn.Module, samples: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
    """One rank's step."""
    axes = [f"domain_{axis}" for axis in range(len(sizes) - 1)]
    mesh = lightning_shard.init_mesh(dict(zip(["data", *axes], sizes, strict=True)))
    lightning_shard.parallelize(net, mesh)
    own = samples[mesh["data"].get_local_rank()][None]
    split = lightning_shard.shard(own, mesh[tuple(axes)], range(2, 2 + len(axes)))
    net(split).square().mean().backward()
    return {name: _grad(p) for name, p in net.named_parameters()}


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    grad: Tensor = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=int, nargs="+", default=[4, 4, 4])
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--channels", type=int, default=32)
    options = parser.parse_args()
    difference, seconds = compared(options.mesh, options.resolution, options.channels)
    describe()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = "x".join(map(str, options.mesh))
    row = [sizes, f"{options.resolution}²", f"{difference:.1e}", f"{seconds:.0f}", f"{peak:.1f}"]
    table(["mesh", "field", "relative difference", "seconds", "peak GiB"], [row])


if __name__ == "__main__":
    main()
