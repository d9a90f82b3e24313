"""A layer with a Tucker weight: its core sharded over all ranks, or split over the domain by terms.

    python -m benchmarks.spectral_weights --ranks 2 4

Forward, backward, on one sample of 128 x 128. FSDP2 gathers a core that is sharded over all ranks
while the layer runs; terms stay where they are, and modes travel instead
(lightning_shard/memory/neuralop/factorized.py).
"""

import argparse
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from neuralop.models import TFNO

import lightning_shard
from benchmarks.common import MIB, Cost, describe, measured, start, table
from lightning_shard.memory.neuralop import factorized
from lightning_shard.processes.mesh import make_mesh

CASES = (
    (16, 32, 0.1),
    (32, 32, 0.1),
    (64, 32, 0.1),
    (64, 64, 0.1),
    (128, 64, 0.1),
    (128, 64, 0.42),
    (256, 64, 0.42),
)
HEADER = (
    "width, modes, rank", "ranks", "core MiB", "rule", "gathered: CPU s", "MiB sent", "peak MiB",
    "by terms: CPU s", "MiB sent", "peak MiB",
)  # fmt: skip


def compare(case: tuple[int, int, float]) -> tuple[Cost, Cost]:
    """(gathered, by terms)."""
    return _cost(*case, split=False), _cost(*case, split=True)


def _cost(width: int, modes: int, rank: float, *, split: bool) -> Cost:
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    with mock.patch("lightning_shard.fsdp.split_weights.travels_less", return_value=split):
        mesh = make_mesh("cpu", 1, (dist.get_world_size(),))
        net = TFNO((modes, modes), 1, 1, width, n_layers=1, rank=rank, channel_mlp_skip=None,
                   lifting_channel_ratio=1, projection_channel_ratio=1)  # fmt: skip
        lightning_shard.parallelize(net, mesh)
    field = lightning_shard.shard(torch.randn(1, 1, 128, 128), mesh["domain"], 2)

    def step() -> None:
        (2 * net(field)).square().mean().backward()
        net.zero_grad()

    return measured(step, step)


def core_of(width: int, modes: int, rank: float) -> torch.nn.Module:
    net = TFNO((modes, modes), 1, 1, width, n_layers=1, rank=rank)
    weight = net.fno_blocks.convs[0].weight
    assert isinstance(weight, torch.nn.Module)
    return weight


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    describe()
    rows = []
    for case in CASES:
        weight = core_of(*case)
        size = 8 * weight.get_parameter("core").numel() / MIB
        rule = "terms" if factorized.travels_less(weight, "cpu") else "gather"
        for ranks in options.ranks:
            costs = start(ranks, compare, case)
            found = [f"{value:.4g}" for c in costs for value in (c.cpu, c.sent / MIB, c.peak / MIB)]
            rows.append([", ".join(map(str, case)), ranks, f"{size:.3g}", rule, *found])
    table(HEADER, rows)


if __name__ == "__main__":
    main()
