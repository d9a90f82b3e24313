"""Attention over a split sequence: gather, all-to-all and ring beside one process.

Forward and backward of F.scaled_dot_product_attention in float32: self-attention, batch 1, queries,
keys and values split along the sequence. Each figure is that of the rank that needs most; time is
processor time, memory the peak above the operands. A star marks the algorithm that the rule in
lightning_shard/ops/attention/rule.py chooses.

Run `python benchmarks/attention.py`: a few minutes on 2 cores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import lightning_shard
from benchmarks.common import Cost, describe, measured, start, table
from lightning_shard.ops.attention import rule as attention

ALGORITHMS = ("gather", "all_to_all", "ring")
RANKS = (2, 4)
CASES = [  # sequence, heads, features of each, causal
    (512, 8, 32, False),
    (2048, 8, 32, False),
    (2048, 8, 32, True),
    (2048, 6, 32, False),
    (2048, 5, 32, False),
    (2048, 1, 256, False),
    (8192, 1, 32, False),
]
HEAD = ["S, H, E", "ranks", "algorithm", "CPU s", "to gather", "to one process", "MB sent",
        "to gather", "peak MB", "to gather", "to one process", "chosen"]  # fmt: skip


def main() -> None:
    describe()
    alone = start(1, costs, ["gather"])[0]
    found = {ranks: start(ranks, costs, ALGORITHMS) for ranks in RANKS}
    rows = []
    for i, (length, heads, features, causal) in enumerate(CASES):
        about = f"{length}, {heads}, {features}" + ", causal" * causal
        one, _ = alone[i]
        rows.append(row(about, 1, "", one, one, one, ""))
        for ranks in RANKS:
            gather, _ = found[ranks][0][i]
            for name, each in zip(ALGORITHMS, found[ranks], strict=True):
                this, chosen = each[i]
                rows.append(row(about, ranks, name, this, gather, one, "*" * (chosen == name)))
    table(HEAD, rows)


def row(about: str, ranks: int, name: str, this: Cost, gather: Cost, one: Cost, mark: str) -> list:
    return [
        about, ranks, name,
        f"{this.cpu:.2f}", ratio(this.cpu, gather.cpu), ratio(this.cpu, one.cpu),
        f"{this.sent / 1e6:.2f}", ratio(this.sent, gather.sent),
        f"{this.peak / 1e6:.1f}", ratio(this.peak, gather.peak), ratio(this.peak, one.peak), mark,
    ]  # fmt: skip


def costs(algorithms: Sequence[str]) -> list[list[tuple[Cost, str]]]:
    """For each algorithm the cost of each case, and what the rule chooses for it."""
    return [[cost(algorithm, *case) for case in CASES] for algorithm in algorithms]


def cost(algorithm: str, length: int, heads: int, features: int, causal: bool) -> tuple[Cost, str]:
    by_rule = [""]

    def choose(operands: attention.Operands, possible: Mapping[str, attention.Layout]) -> str:
        by_rule.append(rule(operands, possible))
        return algorithm if algorithm in possible else "gather"

    rule = attention.choose
    with mock.patch.object(attention, "choose", choose):
        small = step_of(64, heads, features, causal)
        found = measured(step_of(length, heads, features, causal), small)
    return found, by_rule[-1]


def step_of(length: int, heads: int, features: int, causal: bool) -> Callable[[], None]:
    """Attention forward and backward."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    locals_ = [
        torch.randn(1, heads, length // ranks, features, requires_grad=True) for _ in range(3)
    ]
    shape = (1, heads, length, features)

    def step() -> None:
        operands: list[Any] = [*locals_]
        if ranks > 1:
            operands = [lightning_shard.from_local(x, mesh, 2, shape) for x in locals_]
        out: Any = F.scaled_dot_product_attention(*operands, is_causal=causal)
        local = out if ranks == 1 else out.to_local()
        torch.autograd.grad(local, locals_, torch.ones_like(local))

    return step


def ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference else ""


if __name__ == "__main__":
    main()
