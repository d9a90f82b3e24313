"""Says in one line what a domain splits of a batch, read off the batch that the steps see."""

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_shard.data.tree import named_leaves
from lightning_shard.tensor.tensor import DomainTensor


@dataclass(frozen=True)
class SplitSummary:
    """Holds which entries of a batch are split; `str` makes a line of it.

    Attributes:
        split: The dims of each entry along which it is split over ranks.
        whole: The dtype of each entry that every rank holds whole.
        split_bytes: Bytes of all split entries together, on all ranks.
        whole_bytes: Bytes of all whole entries, on one rank.
    """

    split: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    whole: dict[str, str] = field(default_factory=dict[str, str])
    split_bytes: int = 0
    whole_bytes: int = 0

    def __str__(self) -> str:
        split = [
            f"{name} (dim{'s' * (len(dims) > 1)} {', '.join(map(str, dims))})"
            for name, dims in self.split.items()
        ]
        parts = [f"split over the domain: {', '.join(split) or 'nothing'}"]
        if self.whole:
            parts.append(f"whole: {', '.join(f'{n} ({d})' for n, d in self.whole.items())}")
        return "; ".join(parts)

    def advice(self, ranks: int) -> str:
        """Advise on a domain of so many ranks that splits nothing."""
        name = next(iter(self.whole), "x")
        return (
            f"nothing of the batch is split, though {ranks} ranks share each sample: each of them "
            "computes the whole step, and the domain saves nothing. Name what to split, such as "
            f"shard_dims={{{name!r}: 1}}, or use domain_parallel_size 1."
        )


class Announcements:
    """Prints once in a run which entries are split, and warns if none is.

    Rank 0 prints.
    """

    def __init__(self) -> None:
        """Begin with nothing printed."""
        self._said: set[tuple[TrainerFn | None, str]] = set()

    def say(self, summary: SplitSummary, stage: TrainerFn | None, ranks: int) -> None:
        """Print it on the first rank, unless this stage has printed it.

        Args:
            summary: The summary of a batch.
            stage: The stage of the Trainer.
            ranks: The number of ranks that share each sample.
        """
        if (stage, str(summary)) in self._said:
            return
        self._said.add((stage, str(summary)))
        rank_zero_info(str(summary))
        if not summary.split:
            rank_zero_warn(summary.advice(ranks))


def split_summary(batch: Any) -> SplitSummary:
    """Read off a batch what is split, once `shard_batch` has split it."""
    split: dict[str, tuple[int, ...]] = {}
    whole: dict[str, str] = {}
    bytes_of = {True: 0, False: 0}
    for path, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor):
            continue
        name = ".".join(map(str, path)) or "batch"
        dims = leaf.subdomain.layout.split_dims if isinstance(leaf, DomainTensor) else ()
        bytes_of[bool(dims)] += leaf.numel() * leaf.dtype.itemsize
        if dims:
            split[name] = dims
        else:
            whole[name] = str(leaf.dtype).removeprefix("torch.")
    return SplitSummary(split, whole, bytes_of[True], bytes_of[False])
