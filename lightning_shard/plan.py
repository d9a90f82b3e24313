"""What one rank will hold and send in a training step, predicted from rehearsals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_shard.batch import ShardDims
from lightning_shard.rehearsal import Data, rehearse

KIB = 1024


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank in one training step; `print` it.

    Attributes:
        processes: Data replicas x domain ranks.
        domain: Ranks along each split dim.
        parameters: This rank's shards.
        gradients: Of these.
        optimizer: The optimizer's states of these.
        gathered: Whole parameters of a block, of the next one, and gradients of a block.
        activations: What forward keeps for backward, of this rank's part of the fields.
        batch: This rank's part of it.
        sent_for_parameters: Two gathers of the parameters and one reduction of their gradients.
        sent_for_fields: Halos, Fourier modes, sums: on the ranks of a small domain.
        rehearsed: The domain of which that is.
        alone: What one process without any sharding holds.
    """

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
        """All that a rank holds at the peak, without what operations need while they run."""
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.gathered + self.activations + self.batch

    def __str__(self) -> str:
        ranks = math.prod(self.domain)
        rows = [
            ("parameters", self.parameters, f"1/{self.processes} of all"),
            ("gradients", self.gradients, "as many"),
            ("optimizer", self.optimizer, "its states of these"),
            ("gathered", self.gathered, "two blocks' parameters, one block's gradients"),
            ("activations", self.activations, "kept from forward for backward"),
            ("batch", self.batch, f"1/{ranks} of each sample"),
            ("memory", self.memory, f"{_size(self.alone)} in one process"),
            ("sent: parameters", self.sent_for_parameters, "per step, over all ranks"),
        ]
        if ranks > 1:
            where = f"{'x'.join(map(str, self.rehearsed))} ranks"
            note = f"per step, within the domain; measured on {where}"
            rows.append(("sent: fields", self.sent_for_fields, note))
        replicas = self.processes // ranks
        shape = f"{replicas} data replicas x {'x'.join(map(str, self.domain))} domain ranks"
        lines = [f"One of {self.processes} ranks ({shape}), in one training step:"]
        lines += [f"  {name:<17} {_size(size):>10}   {note}" for name, size, note in rows]
        return "\n".join(lines)


def plan(
    module: LightningModule,
    data: Data,
    processes: int,
    domain_parallel_size: int | Sequence[int] = 1,
    shard_dims: ShardDims = None,
    **trainer: object,
) -> Plan:
    """Predict what one of many ranks will hold and send, with parameters sharded over all.

    One step runs in one process of this machine, on the CPU, and one on a domain of at most two
    ranks along each dim: activations on more ranks are taken to be smaller in proportion.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica.
        processes: Number of all ranks.
        domain_parallel_size: Ranks that share each sample, or one number for each split dim.
        shard_dims: As of `HybridShardStrategy`.
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
    small, seen = tuple(min(size, 2) for size in domain), [alone]
    if ranks > 1:
        seen = rehearse(module, data, small, shard_dims, **trainer)
    together = len(seen)  # on so many ranks all is known, also that rows with halos are copies
    kept = max(rank.activations for rank in seen) * together // ranks
    sent = max(rank.sent for rank in seen) - _sent(alone.parameters, together)
    blocks = min(2 * alone.block, alone.parameters) + alone.block
    return Plan(
        processes=processes,
        domain=domain,
        parameters=alone.parameters // processes,
        gradients=alone.parameters // processes,
        optimizer=alone.optimizer // processes,
        gathered=blocks if processes > 1 else 0,
        activations=kept,
        batch=alone.batch // ranks,
        sent_for_parameters=_sent(alone.parameters, processes),
        sent_for_fields=max(0, sent),
        rehearsed=small,
        alone=2 * alone.parameters + alone.optimizer + alone.activations + alone.batch,
    )


def _sent(parameters: int, ranks: int) -> int:
    """Two all-gathers and a reduce-scatter."""
    return 3 * parameters * (ranks - 1) // ranks


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < KIB or unit == "GiB":
            break
        count /= KIB
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
