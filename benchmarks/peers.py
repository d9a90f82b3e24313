"""Training steps of networks whose field is split over ranks, beside other packages.

    python -m benchmarks.peers
    python -m benchmarks.peers --no-peer --networks U-Net --ways lightning_shard

It makes an environment with the peer in .venv-peers where the running one has none; --no-peer
leaves it out. All ways take turns in one run. Each figure is the median of its rounds, on the rank
that needs most: forward, mean square and backward of one sample, without the mean of gradients over
data replicas. The limit is what two plain processes take that each compute half of the rows at the
same time and tell each other nothing. "Whole" is stock torch, or stock neuraloperator, on one
thread, while the other ranks do the same. A way is timed if its loss is that of one
process. With --calls the price of single calls follows. Collectives, bytes and activations are
counted at the operators of torch, below all ways alike (step_traffic.py).

All ways run under the policy of threads that this package sets on CPUs. ShardTensor sets none, so
it is timed once more without, by processes of its own. What lets it run on CPUs is in
peer_on_cpus.py.
"""

import argparse
import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import lightning_shard
from benchmarks import dispatch, peer_on_cpus
from benchmarks.common import describe, in_turns, most, start, table
from benchmarks.networks import IN_FLOAT32, NETWORKS
from benchmarks.step_traffic import Seen
from lightning_shard.memory.neuralop.layers import avoid_whole_fields

# the peer imports torchvision, which fits torch of the same build: not 2.13.0+cpu, say
PEER, VERSIONS = "physicsnemo", ["nvidia-physicsnemo==2.2.2", "torch===2.13.0"]
ROOT = Path(__file__).parents[1]
HEAD = (
    "network", "way", "CPU ms", "to the limit", "wall ms", "collectives", "MB sent",
    "MiB of activations", "not timed, since",
)  # fmt: skip
ENVIRONMENT = ROOT / ".venv-peers"
AS_INSTALLED = "ShardTensor, Linux' default threads"  # without the policy that this package sets


# A way to run a network: what it is called with, for the whole field and the mesh of all ranks.
Way = Callable[[nn.Module, Tensor, DeviceMesh], tuple[nn.Module, Any]]


def _whole(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return net, whole


def _limit(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return net, whole.chunk(mesh.size(), 2)[mesh.get_local_rank()].clone()


def _ours(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    avoid_whole_fields(net)  # as the strategy does
    return net, lightning_shard.shard(whole, mesh, 2)


def _peer(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    from physicsnemo import domain_parallel  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        peer_on_cpus.let_it_run()
    parts = whole.chunk(mesh.size(), 2)
    shapes = {0: tuple(part.shape for part in parts)}  # asking for them needs CUDA
    mine = parts[mesh.get_local_rank()].contiguous()
    field = domain_parallel.ShardTensor.from_local(mine, mesh, (Shard(2),), sharding_shapes=shapes)
    return distribute_module(net, mesh), field


def _dtensor(net: nn.Module, whole: Tensor, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    return distribute_module(net, mesh), distribute_tensor(whole, mesh, [Shard(2)])


WAYS: dict[str, Way] = {
    "limit": _limit, "whole": _whole, "lightning_shard": _ours, "ShardTensor": _peer,
    "DTensor": _dtensor, AS_INSTALLED: _peer,
}  # fmt: skip


def _step(net: nn.Module, field: Any) -> Any:
    loss = net(field).square().mean()
    loss.backward()
    return loss.detach()


def _prepared(name: str, way: str, resolution: int, **stored: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net, whole = NETWORKS[name](), torch.randn(1, 3, resolution, resolution)
    net, whole = net.to(**stored), whole.to(**stored)
    return WAYS[way](net, whole, init_device_mesh("cpu", (dist.get_world_size(),)))


def error_of(name: str, way: str, resolution: int) -> float:
    """The error of a way's loss, relative to one process, in float64; every rank calls it."""
    # not to(float32), which would leave out the imaginary parts of weights
    stored: dict[str, Any] = {} if name in IN_FLOAT32 else {"dtype": torch.float64}
    net, field = _prepared(name, way, resolution, **stored)
    wanted = float(_step(*_prepared(name, "whole", resolution, **stored)))
    loss = _step(copy.deepcopy(net) if way == "lightning_shard" else net, field)
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return abs(float(loss) - wanted) / abs(wanted)


@dataclass(frozen=True)
class StepCost:
    """Of a step in one way, on the rank that needs most; seconds and bytes."""

    cpu: float
    wall: float
    collectives: float = 0
    sent: float = 0
    activations: float = 0


def costs(
    name: str, ways: Sequence[str], resolution: int, rounds: int, stored: Any = None
) -> dict[str, StepCost]:
    """What a step takes in each way; every rank calls it.

    Args:
        name: The network.
        ways: Names of `WAYS`.
        resolution: Of the field.
        rounds: Over which the median is taken.
        stored: The memory format of parameters and field; None: rows.
    """
    stored = stored or torch.contiguous_format
    prepared = {way: _prepared(name, way, resolution, memory_format=stored) for way in ways}
    counted = {way: _counts(*given) for way, given in prepared.items()}  # and warms up
    steps = {way: partial(_step, *given) for way, given in prepared.items()}
    times = in_turns(steps, rounds)
    return {way: StepCost(*most(*times[way], *counted[way])) for way in ways}


def _counts(net: nn.Module, field: Any) -> tuple[int, int, int]:
    """Collectives and bytes of a step, and bytes that are kept from forward to backward."""
    _step(net, field)
    with Seen() as seen:
        loss = net(field).square().mean()
        kept = sum(seen.alive(net))
        loss.backward()
    return seen.collectives, seen.sent, kept


def refusal(name: str, way: str, resolution: int, ranks: int = 2) -> str | None:
    """Why a way cannot be timed, tried in processes of its own, since one rank may fail alone."""
    try:
        error = start(ranks, error_of, name, way, resolution)
    except Exception as failure:
        return str(failure).strip().splitlines()[-1][:120]
    return None if error < 1e-5 else f"its loss is wrong by {error:.2g}"


def rows_of(name: str, found: dict[str, StepCost], refused: dict[str, str]) -> list[list[str]]:
    """A line of the table for each way."""
    limit = found["limit"].cpu
    rows = [
        [name, way, f"{c.cpu * 1e3:.0f}", f"{c.cpu / limit:.2f}", f"{c.wall * 1e3:.0f}",
         f"{c.collectives:.0f}", f"{c.sent / 1e6:.2f}", f"{c.activations / 2**20:.1f}", ""]
        for way, c in found.items()
    ]  # fmt: skip
    return rows + [[name, way, *[""] * 6, reason] for way, reason in refused.items()]


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
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    ways = ["lightning_shard", "DTensor", "ShardTensor"]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--calls", nargs="*", choices=dispatch.CALLS, default=[])
    parser.add_argument("--channels-last", action="store_true", help="how all tensors lie")
    parser.add_argument("--no-peer", action="store_true", help="this package and the limit alone")
    options = parser.parse_args()
    if not options.no_peer and importlib.util.find_spec(PEER) is None:
        command = [environment(ENVIRONMENT), "-m", "benchmarks.peers", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    describe()
    print(f"Steps of one sample of {options.resolution}², split over {options.ranks} ranks")
    rows: list[list[str]] = []
    tried = [w for w in options.ways if not (options.no_peer and w == "ShardTensor")]
    for name in options.networks:
        reasons = {w: refusal(name, w, options.resolution, options.ranks) for w in tried}
        ways = ["limit", "whole", *(way for way, reason in reasons.items() if reason is None)]
        stored = torch.channels_last if options.channels_last else None
        sizes = options.resolution, options.rounds, stored
        found = start(options.ranks, costs, name, ways, *sizes)
        if "ShardTensor" in found:
            found |= start(options.ranks, costs, name, [AS_INSTALLED], *sizes, policy=False)
        rows += rows_of(name, found, {way: why for way, why in reasons.items() if why})
    if rows:
        table(HEAD, rows)
    if options.calls:
        print("Processor us for a call, tiny tensors over 2 ranks")
        table(dispatch.HEAD, start(2, dispatch.costs, options.calls))


if __name__ == "__main__":
    main()
