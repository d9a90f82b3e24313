"""Predicts from rehearsals what one rank will hold and send in a training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from lightning_shard.data.split import ShardDims
from lightning_shard.lab.batches import Data
from lightning_shard.lab.step import rehearse
from lightning_shard.trainer.split_summary import SplitSummary

KIB = 1024
MOST = 4  # ranks of a rehearsal


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank in one training step; `print` it.

    Attributes:
        split: Which entries of the batch the rehearsal saw split. The others stay whole.
        processes: Data replicas x domain ranks.
        domain: Ranks along each split dim.
        parameters: This rank's shards of the parameters.
        gradients: This rank's shards of the gradients.
        optimizer: The optimizer's states of these shards.
        gathered: Whole parameters of a block, of the next one, and gradients of a block.
        activations: What forward keeps for backward on the rank that keeps most.
        batch: What this rank holds of the batch.
        sent_for_parameters: Two gathers of the parameters and one reduction of their gradients.
        sent_for_fields: Halos, Fourier modes and sums, on the ranks of `rehearsed`.
        rehearsed: The domain on which this was measured.
        alone: What one process without any sharding holds.
    """

    split: SplitSummary
    processes: int
    domain: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    batch: int
    sent_for_parameters: int
    sent_for_fields: int
    rehearsed: tuple[int, ...]
    alone: int

    @property
    def memory(self) -> int:
        """The peak: all that a rank holds when backward begins, and the gradients that follow.

        What operations need while they run comes on top.
        """
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.gathered + self.activations + self.batch

    def __str__(self) -> str:
        ranks = math.prod(self.domain)
        rows = [
            ("parameters", self.parameters, f"1/{self.processes} of all"),
            ("gradients", self.gradients, f"1/{self.processes} of all"),
            ("optimizer", self.optimizer, f"1/{self.processes} of its states"),
            ("gathered", self.gathered, "two blocks' parameters, one block's gradients"),
            ("activations", self.activations, "kept from forward for backward"),
            ("batch", self.batch, self._batch_note()),
            ("peak memory", self.memory, f"{_size(self.alone)} in one process"),
            ("sent: parameters", self.sent_for_parameters, "per step, over all ranks"),
        ]
        if ranks > 1:
            where = f"{'x'.join(map(str, self.rehearsed))} ranks"
            note = f"per step, within the domain; measured on {where}"
            rows.append(("sent: fields", self.sent_for_fields, note))
        replicas = self.processes // ranks
        shape = f"{replicas} data replicas x {'x'.join(map(str, self.domain))} domain ranks"
        lines = [] if ranks == 1 else [str(self.split)]
        if ranks > 1 and not self.split.split:
            lines.append(f"Warning: {self.split.advice(ranks)}")
        lines.append(f"One of {self.processes} ranks ({shape}), in one training step:")
        lines += [f"  {name:<17} {_size(size):>10}   {note}" for name, size, note in rows]
        return "\n".join(lines)

    def _batch_note(self) -> str:
        ranks = math.prod(self.domain)
        if not self.split.split:
            return "all of each sample"
        if not self.split.whole:
            return f"1/{ranks} of each sample"
        return f"1/{ranks} of what is split, all of the rest"


def plan(
    module: LightningModule,
    data: Data,
    processes: int,
    domain_parallel_size: int | Sequence[int] = 1,
    shard_dims: ShardDims = None,
    **trainer: Any,
) -> Plan:
    """Predict what one of many ranks will hold and send, with parameters sharded over all.

    One step runs in one process of this machine, on the CPU, and one on the domain, or where that
    has more than four ranks, on two and on four of them. From these two it follows which part of
    the activations is split and grows smaller on more ranks, and which part stays.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica.
        processes: Number of all ranks.
        domain_parallel_size: Ranks that share each sample, or one number for each split dim.
        shard_dims: As for `HybridShardStrategy`.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Raises:
        ValueError: The domain does not divide the processes.
    """
    sizes = domain_parallel_size
    domain = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    ranks = math.prod(domain)
    if ranks < 1 or processes < 1 or processes % ranks:
        raise ValueError(
            f"the {processes} processes must be a multiple of the {ranks} ranks that share a "
            "sample; change processes or domain_parallel_size."
        )
    (alone,) = rehearse(module, data, (), shard_dims, **trainer)
    small, seen, activations = (1,) * len(domain), [alone], alone.activations
    thinner = max(1, ranks // MOST)
    if ranks > 1:
        small = _part(domain, MOST)
        seen = rehearse(module, data, small, shard_dims, thinner=thinner, **trainer)
        activations = max(rank.activations for rank in seen)
    if ranks > MOST:
        half = _part(domain, MOST // 2)
        fewer = rehearse(module, data, half, shard_dims, thinner=2 * thinner, **trainer)
        shrinking = max(0, fewer[0].activations - seen[0].activations) * MOST
        activations -= min(activations, shrinking // MOST - shrinking // ranks)
    sent = max(rank.sent for rank in seen) - _sent(alone.parameters, len(seen))
    blocks = min(2 * alone.block, alone.parameters) + alone.block
    split = seen[0].split
    return Plan(
        split=split,
        processes=processes,
        domain=domain,
        parameters=alone.parameters // processes,
        gradients=alone.parameters // processes,
        optimizer=alone.optimizer // processes,
        gathered=blocks if processes > 1 else 0,
        activations=activations,
        batch=max(r.batch for r in seen)
        if ranks <= MOST
        else split.whole_bytes + split.split_bytes // ranks,
        sent_for_parameters=_sent(alone.parameters, processes),
        sent_for_fields=max(0, sent),
        rehearsed=small,
        alone=2 * alone.parameters + alone.optimizer + alone.activations + alone.batch,
    )


def _part(domain: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A domain of the same dims with at most so many ranks, the powers of two that fit in it."""
    if math.prod(domain) <= most:
        return domain
    part = [1] * len(domain)
    while math.prod(part) < most:
        longest = max(range(len(domain)), key=lambda d: domain[d] / part[d])
        part[longest] *= 2
    return tuple(part)


def _sent(parameters: int, ranks: int) -> int:
    """Two all-gathers and a reduce-scatter."""
    return 3 * parameters * (ranks - 1) // ranks


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < KIB or unit == "GiB":
            break
        count /= KIB
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
