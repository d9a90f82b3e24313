"""Says in one line what a domain splits of a batch, read off the batch that the steps see."""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_shard.data.tree import named_leaves
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lightning import TrainerFn, rank_zero_info, rank_zero_warn
from lightning_shard.tensor.placement import dims_split_in


@dataclass(frozen=True)
class SplitSummary:
    """Holds which entries of a batch are split; `str` makes a line of it.

    Attributes:
        split: The dims of each entry along which it is split over ranks.
        whole: The dtype of each entry that every rank holds whole.
    """

    split: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    whole: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def dims(self) -> str:
        """The entries that are split, each with its dims, in words."""
        return ", ".join(
            f"{name} (dim{'s' * (len(dims) > 1)} {', '.join(map(str, dims))})"
            for name, dims in self.split.items()
        )

    def __str__(self) -> str:
        parts = [f"split over the domain: {self.dims or 'nothing'}"]
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

    def __init__(self, *, by_default: bool = False) -> None:
        """Begin with nothing printed."""
        self._said: set[tuple[TrainerFn | None, str]] = set()
        self._newest, self._by_default = SplitSummary(), by_default

    def say(self, summary: SplitSummary, stage: TrainerFn | None, ranks: int) -> None:
        """Print it on the first rank, unless this stage has printed it.

        Args:
            summary: The summary of a batch.
            stage: The stage of the Trainer.
            ranks: The number of ranks that share each sample.
        """
        self._newest = summary
        if (stage, str(summary)) in self._said:
            return
        self._said.add((stage, str(summary)))
        rank_zero_info(str(summary))
        if not summary.split:
            rank_zero_warn(summary.advice(ranks))

    def explain(self, error: BaseException) -> None:
        """Add the dims that were split to a refusal that the default dims have caused."""
        words = r"split channels|features of \w+ are split|all (steps|features)"
        caused = isinstance(error, UnsupportedOperationError) and re.search(words, str(error))
        if caused and self._by_default and self._newest.split:
            names = ", ".join(f"{name!r}: dim" for name in self._newest.split)
            error.add_note(
                f"shard_dims was not given, so these dims were split: {self._newest.dims}. "
                "Where entries are (B, T, C, *spatial) or (B, T, C), name others: "
                f"shard_dims={{{names}}}."
            )


def split_summary(batch: Any) -> SplitSummary:
    """Read off a batch what is split, once `shard_batch` has split it."""
    split: dict[str, tuple[int, ...]] = {}
    whole: dict[str, str] = {}
    for path, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor):
            continue
        name = ".".join(map(str, path)) or "batch"
        dims = dims_split_in(leaf)
        if dims:
            split[name] = dims
        else:
            whole[name] = str(leaf.dtype).removeprefix("torch.")
    return SplitSummary(split, whole)
