"""Training steps of networks whose field is split over two ranks: beside PhysicsNeMo's ShardTensor.

    python -m benchmarks.peers

It makes an environment with the peer in .venv-peers where the running one has none; --no-peer
leaves it out. All ways take turns in one run. Each figure is the median of its rounds, on the rank
that needs most: forward, mean square and backward of one sample, without the mean of gradients over
data replicas. The limit is what two plain processes take that each compute half of the rows at the
same time and tell each other nothing. A way is timed if its loss is that of one process.
"""

import argparse
import copy
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from neuralop.models import TFNO
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from benchmarks.common import describe, start, table
from benchmarks.unet_step import UNet
from lightning_modules.cnn.simple_cnn import SimpleCNN
from lightning_shard.fsdp.neuralop.layers import avoid_whole_fields

PEER, VERSIONS = "physicsnemo", ["nvidia-physicsnemo==2.2.2", "torch==2.13.*"]
ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-peers"


class ViT(nn.Module):
    """Patches of 8x8, encoder layers with attention over all patches, a value for each patch."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.layers = nn.ModuleList(_Attention(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, patches, 1)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, nn.Linear(width, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self._by_head(of(y)) for of in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def _tfno() -> nn.Module:
    return TFNO((16, 16), 3, 1, hidden_channels=16, n_layers=2, rank=0.1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tutorial CNN": SimpleCNN,
    "U-Net": lambda: UNet(16),
    "ViT": ViT,
    "TFNO": _tfno,
}
# A way to run a network: what it is called with, for the whole field and the mesh of all ranks.
Way = Callable[[nn.Module, Tensor, DeviceMesh], tuple[nn.Module, Any]]


def _whole(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return net, whole


def _limit(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return net, whole.chunk(mesh.size(), 2)[mesh.get_local_rank()].contiguous()


def _ours(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    avoid_whole_fields(net)  # as the strategy does
    return net, lightning_shard.shard(whole, mesh, 2)


def _peer(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    from physicsnemo import domain_parallel  # pyright: ignore[reportMissingImports]
    from torch.distributed.tensor import Shard, distribute_module

    if not torch.cuda.is_available():
        domain_parallel.register_custom_ops()  # which it does itself with CUDA
    parts = whole.chunk(mesh.size(), 2)
    shapes = {0: tuple(part.shape for part in parts)}  # asking for them needs CUDA
    mine = parts[mesh.get_local_rank()].contiguous()
    field = domain_parallel.ShardTensor.from_local(mine, mesh, (Shard(2),), sharding_shapes=shapes)
    return distribute_module(net, mesh), field


WAYS: dict[str, Way] = {
    "limit": _limit, "whole": _whole, "lightning_shard": _ours, "ShardTensor": _peer,
}  # fmt: skip


def _step(net: nn.Module, field: Any) -> Any:
    loss = net(field).square().mean()
    loss.backward()
    return loss.detach()


def _prepared(name: str, way: str, resolution: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net, whole = NETWORKS[name](), torch.randn(1, 3, resolution, resolution)
    return WAYS[way](net, whole, init_device_mesh("cpu", (dist.get_world_size(),)))


def error_of(name: str, way: str, resolution: int) -> float:
    """The error of a way's loss, relative to that of one process; every rank calls it."""
    net, field = _prepared(name, way, resolution)
    wanted = float(_step(*_prepared(name, "whole", resolution)))
    loss = _step(copy.deepcopy(net) if way != "ShardTensor" else net, field)
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return abs(float(loss) - wanted) / abs(wanted)


def costs(
    name: str, ways: Sequence[str], resolution: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Processor and wall-clock seconds of a step in each way; every rank calls it."""
    prepared = {way: _prepared(name, way, resolution) for way in ways}
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, (net, field) in prepared.items():
            dist.barrier()
            begin = time.process_time(), time.perf_counter()
            _step(net, field)
            took = time.process_time() - begin[0], time.perf_counter() - begin[1]
            spent[way] += [took] if number else []  # the first round warms up
    found = {}
    for way, times in spent.items():
        worst = torch.tensor([median(each) for each in zip(*times, strict=True)])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[way] = (float(worst[0]), float(worst[1]))
    return found


def refusal(name: str, way: str, resolution: int) -> str | None:
    """Why a way cannot be timed, tried in processes of its own, since one rank may fail alone."""
    try:
        error = start(2, error_of, name, way, resolution)
    except Exception as failure:
        return str(failure).strip().splitlines()[-1]
    return None if error < 1e-4 else f"its loss is wrong by {error:.0%}"


def rows_of(
    name: str, found: dict[str, tuple[float, float]], refused: dict[str, str]
) -> list[list[str]]:
    """A line of the table for each way."""
    limit = found["limit"][0]
    rows = [
        [name, way, f"{cpu * 1e3:.0f}", f"{cpu / limit:.2f}", f"{wall * 1e3:.0f}", ""]
        for way, (cpu, wall) in found.items()
    ]
    return rows + [[name, way, "", "", "", reason] for way, reason in refused.items()]


def environment(path: Path) -> str:
    """Make an environment with this package and the peer, once; gives its interpreter."""
    python = str(path / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "--editable", f"{ROOT}[workloads]", *VERSIONS], check=True)
    return python


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true", help="this package and the limit alone")
    options = parser.parse_args()
    if not options.no_peer and importlib.util.find_spec(PEER) is None:
        command = [environment(ENVIRONMENT), "-m", "benchmarks.peers", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    describe()
    print(f"Steps of one sample of {options.resolution}², split over 2 ranks")
    rows: list[list[str]] = []
    tried = ["lightning_shard"] if options.no_peer else ["lightning_shard", "ShardTensor"]
    for name in options.networks:
        reasons = {way: refusal(name, way, options.resolution) for way in tried}
        ways = ["limit", "whole", *(way for way, reason in reasons.items() if reason is None)]
        found = start(2, costs, name, ways, options.resolution, options.rounds)
        rows += rows_of(name, found, {way: why for way, why in reasons.items() if why})
    table(["network", "way", "CPU ms", "to the limit", "wall ms", "not timed, since"], rows)


if __name__ == "__main__":
    main()
