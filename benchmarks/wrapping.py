"""The size from which on a part of a network is worth a gather of its own.

It is the default in fsdp/blocks.py.

    python -m benchmarks.wrapping

A training step of unmodified networks on 2 ranks, their blocks found with several thresholds:
processor seconds, collectives, and the most parameters that are gathered at once.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torchvision
from neuralop.models import TFNO
from torch import Tensor, nn

import lightning_shard
from benchmarks.common import describe, measured, start, table
from lightning_shard.fsdp import blocks as wrap
from lightning_shard.processes.mesh import make_mesh

THRESHOLDS = [1, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10**9]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet50": (torchvision.models.resnet50, lambda: torch.randn(2, 3, 64, 64)),
    "swin_t": (torchvision.models.swin_t, lambda: torch.randn(2, 3, 64, 64)),
    "tfno": (
        lambda: TFNO((16, 16), 1, 1, 24, factorization="tucker", rank=0.4),
        lambda: torch.randn(2, 1, 32, 32),
    ),
}


def costs(name: str) -> list[list[str]]:
    """A row for each threshold."""
    make, sample = NETWORKS[name]
    rows = []
    for least in THRESHOLDS:
        wrap.MIN_BLOCK_NUMEL = least
        net = make()
        found = wrap.blocks(net)
        inside = {p for block in found for p in block.parameters()}
        root = sum(p.numel() for p in net.parameters() if p not in inside)
        largest = max((sum(p.numel() for p in b.parameters()) for b in found), default=0)
        lightning_shard.parallelize(net, make_mesh("cpu", dist.get_world_size(), (1,)))
        x = sample()

        def step(net: nn.Module = net, x: Tensor = x) -> None:
            net(x).square().mean().backward()
            net.zero_grad()

        cost = measured(step, step)
        rows.append([name, f"{least:,}", len(found), f"{cost.cpu:.3f}", f"{root + largest:,}"])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    rows = [row for name in parser.parse_args().networks for row in start(2, costs, name)]
    describe()
    table(["network", "from parameters", "blocks", "CPU s", "gathered at once"], rows)


if __name__ == "__main__":
    main()
