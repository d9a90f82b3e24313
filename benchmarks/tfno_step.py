"""A training step of a whole TFNO: one process with stock code, and its field split over ranks.

    python -m benchmarks.tfno_step --resolution 1024

One sample, forward, relative L2 loss, backward and Adam. Memory is what a rank needs beyond weights
and sample; bytes are those of fields and modes, and of FSDP2's collectives where torch calls them
through torch.distributed.
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from neuralop.losses import LpLoss
from neuralop.models import TFNO
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard
from benchmarks.common import MIB, Cost, describe, measured, start, table
from lightning_shard.processes.mesh import make_mesh


def cost_of_step(resolution: int, hidden: int, modes: int) -> Cost:
    """Of the ranks that call it."""
    return measured(_step(resolution, hidden, modes), _step(32, hidden, modes))


def _step(resolution: int, hidden: int, modes: int) -> Callable[[], None]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    net: torch.nn.Module = TFNO((modes, modes), 1, 1, hidden, factorization="tucker", rank=0.1)
    fields = torch.randn(2, 1, 1, resolution, resolution)
    x, y = fields[0], fields[1]
    if ranks > 1:
        mesh = make_mesh("cpu", 1, (ranks,))
        lightning_shard.parallelize(net, mesh)
        x, y = (_split(part, mesh["domain"]) for part in (x, y))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = LpLoss(d=2, reduction="mean")

    def step() -> None:
        loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _split(field: Tensor, mesh: DeviceMesh) -> Tensor:
    local = lightning_shard.shard(field, mesh, 2).to_local().clone()
    return lightning_shard.from_local(local, mesh, 2, field.shape)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--modes", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    sizes = options.resolution, options.hidden, options.modes
    costs = {ranks: start(ranks, cost_of_step, *sizes) for ranks in options.ranks}
    describe()
    print(f"TFNO, {sizes[0]}², {sizes[1]} channels, {sizes[2]} modes")
    first = next(iter(costs.values()))
    rows = [
        [n, f"{c.cpu:.2f}", f"{c.sent / MIB:.3g}", f"{c.peak / MIB:.0f}",
         f"{c.peak / first.peak:.2f}"]
        for n, c in costs.items()
    ]  # fmt: skip
    table(["ranks", "CPU s", "MiB sent", "peak MiB", "of one process"], rows)


if __name__ == "__main__":
    main()
