"""What lies in memory from forward to backward, and where, by how activations are kept.

    python -m benchmarks.activations

A U-Net, a TFNO and T5 on 2 ranks that split one sample. Counted on the rank that holds most, after
forward: every storage that is still there and is neither a parameter nor the batch. "On the host"
is what an accelerator's memory no longer holds. This machine has no accelerator, so an offloaded
tensor is copied beside its place in the same memory, and counted there.
"""

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_shard
from benchmarks.common import MIB, describe, most, start, table
from benchmarks.memory import T5, Operator
from benchmarks.networks import UNet
from benchmarks.step_traffic import Seen
from lightning_shard import ShardingOptions
from lightning_shard.memory import offload
from lightning_shard.processes.mesh import make_mesh

_copies: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the storage that was copied
_hosted: set[int] = set()  # storages that stand for the host's memory


class Loss(nn.Module):
    """The squared output of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> ()."""
        return self.network(x).square().mean()


# a network, its sample, the dim that is split, its blocks, and the operators whose results are kept
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int, str, list[str]]] = {
    "U-Net, 256²": (
        lambda: Loss(UNet(16)), lambda: torch.randn(1, 3, 256, 256), 2, "Sequential",
        ["convolution"],
    ),
    "TFNO, 256²": (
        lambda: Operator(32), lambda: torch.randn(1, 1, 256, 256), 2, "FNOBlocks", ["bmm", "mm"],
    ),
    "T5, 256 tokens": (
        lambda: T5(512), lambda: torch.randint(2, 1000, (1, 256)), 1, "T5Block", ["mm", "bmm"],
    ),
}  # fmt: skip


def ways(block: str, keeps: list[str]) -> dict[str, dict[str, Any]]:
    """Options by the name of a row."""
    return {
        "kept": {},
        "activation_checkpointing": {"activation_checkpointing": [block]},
        f"... checkpoint_keeps={keeps}": {
            "activation_checkpointing": [block], "checkpoint_keeps": keeps,
        },
        "activation_offload": {"activation_offload": [block]},
    }  # fmt: skip


class _Beside(saved_tensors_hooks):
    """In the place of `offload.OnHost`: copies what it would move, each storage once."""

    def __init__(self, budget: int | None = None) -> None:
        def pack(tensor: Tensor) -> Any:
            if not offload.is_moved(tensor):
                return tensor
            storage = tensor.untyped_storage()
            copied = _copies.get(storage._cdata)
            if copied is None or (copy := copied()) is None:
                copy = storage.clone()
                _hosted.add(copy._cdata)
                _copies[storage._cdata] = weakref.ref(copy)
                weakref.finalize(storage, _copies.pop, storage._cdata, None).atexit = False
            like = torch.empty(0, dtype=tensor.dtype)
            return like.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

        super().__init__(pack, lambda tensor: tensor)


def counts(name: str, rounds: int) -> dict[str, tuple[float, ...]]:
    """For each way MiB on the device, MiB on the host, and processor ms of a step."""
    make, sample, dim, block, keeps = CASES[name]
    found: dict[str, tuple[float, ...]] = {}
    for way, options in ways(block, keeps).items():
        torch.manual_seed(0)
        net, mesh = make(), make_mesh("cpu", 1, (dist.get_world_size(),))
        lightning_shard.parallelize(net, mesh, options=ShardingOptions(**options))
        x = lightning_shard.shard(sample(), mesh["domain"], dim)
        with mock.patch.object(offload, "OnHost", _Beside):
            net(x).backward()
            _hosted.clear()
            with Seen() as seen:
                loss = net(x)
            seen.hosted = _hosted
            held = seen.alive(net)
            loss.backward()
        spent: list[float] = []
        for _ in range(rounds):
            begin = time.process_time()
            net(x).backward()
            spent.append(1e3 * (time.process_time() - begin))
        found[way] = tuple(most(held[0] / MIB, held[1] / MIB, statistics.median(spent)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    describe()
    rows: list[list[str]] = []
    for name in options.networks:
        for way, (device, host, cpu) in start(2, counts, name, options.rounds).items():
            rows.append([name, way, f"{device:.1f}", f"{host:.1f}", f"{cpu:.0f}"])
    table(["network", "activations", "MiB on the device", "on the host", "CPU ms of a step"], rows)


if __name__ == "__main__":
    main()
