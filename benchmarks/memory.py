"""Bytes per rank of parameters, gradients, optimizer state and activations, on several meshes.

    python -m benchmarks.memory

T5 (its sequence split over the domain) and a TFNO (its field), one sample for each data replica,
Adam. Counted on the rank that holds most: the shards between two steps; at the peak of a step also
what FSDP2 has gathered and not yet reduced; and activations, that is what autograd saves in forward
and is no parameter. Beside them, by arithmetic, DDP (everything on every rank) and the way of
PhysicsNeMo's tutorial of ShardTensor (FSDP over data, parameters once for each domain rank).
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from neuralop.models import TFNO
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightning_shard
from benchmarks.common import MIB, describe, most, start, table
from lightning_shard.fsdp.blocks import blocks
from lightning_shard.processes.mesh import make_mesh

MESHES = {  # by the number of ranks
    2: {"2x1": (2, 1), "1x2": (1, 2)},
    4: {"4x1": (4, 1), "2x2": (2, 2), "1x4": (1, 4)},
}


@dataclass
class Bytes:
    """Of one rank.

    Attributes:
        parameters: Between two steps, as the next two.
        gradients: After backward.
        optimizer: State that is as large as the parameters.
        peak: The most of these together, at any time in a step, with what is gathered.
        activations: What autograd saves in forward.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    activations: int = 0

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class T5(nn.Module):
    """The loss of repeating a sequence, (B, S) -> ()."""

    def __init__(self, size: int) -> None:
        super().__init__()
        config = transformers.T5Config(
            d_model=size, d_ff=4 * size, num_layers=6, num_heads=size // 64,
            decoder_start_token_id=0,  # pyright: ignore[reportCallIssue] which transformers takes as others
        )  # fmt: skip
        self.network = transformers.T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.network(input_ids=ids, labels=ids).loss


class Operator(nn.Module):
    """The squared output of a TFNO, (B, 1, H, W) -> ()."""

    def __init__(self, modes: int) -> None:
        super().__init__()
        self.network = TFNO((modes, modes), 1, 1, 32, factorization="tucker", rank=0.4)

    def forward(self, field: Tensor) -> Tensor:
        return self.network(field).square().mean()


Model = tuple[Callable[[], nn.Module], Callable[[], Tensor], int]


def models(size: int, sequence: int, modes: int, resolution: int) -> dict[str, Model]:
    """For each name a network, its input for one data replica, and the dim that is split."""
    return {
        f"T5, width {size}, {sequence} tokens": (
            lambda: T5(size),
            lambda: torch.randint(2, 1000, (1, sequence)),
            1,
        ),
        f"TFNO, {modes} modes, {resolution}²": (
            lambda: Operator(modes),
            lambda: torch.randn(1, 1, resolution, resolution),
            2,
        ),
    }


def counts(sizes: tuple[int, int, int, int]) -> dict[str, dict[str, Any]]:
    """For each model the bytes of one process, of its largest block, and of each mesh."""
    results: dict[str, dict[str, Any]] = {}
    for name, (make, sample, dim) in models(*sizes).items():
        torch.manual_seed(0)
        alone = make()
        found: dict[str, Any] = {"block": _largest_block(alone)}
        if dist.get_rank() == 0:
            found["1x1"] = _counted(alone, sample())
        del alone
        dist.barrier()
        for label, (data, domain) in MESHES[dist.get_world_size()].items():
            mesh = make_mesh("cpu", data, (domain,))
            torch.manual_seed(0)
            net = make()
            lightning_shard.parallelize(net, mesh)
            x = sample()
            if domain > 1:
                x = lightning_shard.shard(x, mesh["domain"], dim)
            found[label] = most_of(_counted(net, x))
        results[name] = found
    return results


def _largest_block(net: nn.Module) -> int:
    """Bytes of the parameters that one collective gathers at most; the root is a block, too."""
    inner = blocks(net)
    rest = set(net.parameters()) - {p for block in inner for p in block.parameters()}
    sizes = [sum(p.nbytes for p in block.parameters()) for block in inner]
    return max([*sizes, sum(p.nbytes for p in rest)])


def _counted(net: nn.Module, x: Tensor) -> Bytes:
    return count(net, lambda: net(x), torch.optim.Adam(net.parameters(), lr=1e-3))


def count(net: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Bytes:
    """What this rank holds in a step.

    Args:
        net: The network, after `parallelize` on several ranks.
        loss: Runs it and gives its loss.
        optimizer: Of its parameters.
    """
    found = Bytes()
    for _ in range(2):  # in the second step optimizer states are there
        optimizer.zero_grad()
        with _watched(net, optimizer, found):
            loss().backward()
        found.gradients = sum(_local(p.grad).nbytes for p in net.parameters() if p.grad is not None)
        optimizer.step()
        found.optimizer = _state_bytes(optimizer)
        found.peak = max(found.peak, _held(net) + found.optimizer)
    found.parameters = sum(_local(p).nbytes for p in net.parameters())
    return found


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values()]
    return sum(_local(v).nbytes for v in values if isinstance(v, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(net: nn.Module) -> int:
    """Parameters and gradients of now, shards and what is gathered, each storage once."""
    tensors: list[Tensor] = []
    for module in net.modules():
        tensors += [p for p in module._parameters.values() if p is not None]
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for p in group.fsdp_params if group else ():
                tensors += [p.sharded_param, *p.all_gather_outputs]
                tensors.append(getattr(p, "_unsharded_param", p.sharded_param))
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [_local(t).untyped_storage() for t in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


@contextmanager
def _watched(net: nn.Module, optimizer: torch.optim.Optimizer, found: Bytes) -> Iterator[None]:
    """Inside, count what is saved for backward and, at each look at it, what is held."""
    saved: dict[int, int] = {}
    known: set[int] = set()  # of parameters
    handles: list[Any] = []

    def gathered(module: nn.Module, *_: Any) -> None:
        for p in module.parameters():
            if not isinstance(p, DTensor) and p.untyped_storage()._cdata not in known:
                known.add(p.untyped_storage()._cdata)
                handles.append(p.register_post_accumulate_grad_hook(lambda _: look()))
        look()

    def look() -> None:
        found.peak = max(found.peak, _held(net) + _state_bytes(optimizer))

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        look()
        return tensor

    watched = [m for m in net.modules() if m is net or isinstance(m, FSDPModule)]
    handles.extend(m.register_forward_pre_hook(gathered) for m in watched)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    for handle in handles:
        handle.remove()
    found.activations = sum(saved.values())


def most_of(mine: Bytes) -> Bytes:
    """What `count` gives of the rank that needs most, of each kind; called on each rank."""
    return Bytes(*map(int, most(*vars(mine).values())))


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512, help="of T5; a multiple of 64")
    parser.add_argument("--sequence", type=int, default=256, help="tokens")
    parser.add_argument("--modes", type=int, default=64, help="of TFNO")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4, choices=MESHES)
    options = parser.parse_args()
    sizes = options.width, options.sequence, options.modes, options.resolution
    results = start(options.ranks, counts, sizes)
    describe()
    for name, found in results.items():
        _print(name, found, MESHES[options.ranks])


def _print(name: str, found: dict[str, Any], meshes: dict[str, tuple[int, int]]) -> None:
    one, block = found["1x1"], found["block"]
    print(f"\n{name}; MiB per rank; largest block {block / MIB:.1f}")
    rows = []
    for label in ("1x1", *meshes):
        mine, (data, domain) = found[label], meshes.get(label, (1, 1))
        bound = one.states / (data * domain) + block
        share = mine.activations * domain / one.activations
        rows.append([
            label, *(f"{b / MIB:.1f}" for b in (mine.parameters, mine.gradients, mine.optimizer)),
            f"{mine.states / MIB:.1f}", f"{bound / MIB:.1f}", f"{mine.peak / MIB:.1f}",
            f"{mine.activations / MIB:.1f}", f"{share:.2f}",
            f"{one.states / MIB:.1f}", f"{one.states / data / MIB:.1f}",
        ])  # fmt: skip
    head = [
        "data x domain", "parameters", "gradients", "optimizer", "together", "bound",
        "peak in a step", "activations", "x domain / of 1x1", "DDP", "ShardTensor",
    ]  # fmt: skip
    table(head, rows)


if __name__ == "__main__":
    main()
