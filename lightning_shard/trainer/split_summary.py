"""Says in one line what a domain splits of a batch, read off the batch that the steps see."""

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

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
        self._guessed: dict[str, _Guess] = {}  # guesses for the newest batch, without shard_dims

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

    def guess(self, batch: Any, module: nn.Module) -> None:
        """Remember which dims of a batch are split by default, and ask where they are features.

        Args:
            batch: The batch, split.
            module: The module, whose layers tell what the last dim of (B, ., .) is.
        """
        before, self._guessed = self._guessed, {}
        for path, leaf in named_leaves(batch):
            if isinstance(leaf, Tensor):
                dims = dims_split_in(leaf)
                self._guessed[str((*path, 0)[0])] = _Guess(tuple(leaf.shape), dims)
        features = {n: 1 for n, g in self._guessed.items() if g.is_of_features(module)}
        if features and not before:
            rank_zero_warn(
                "shard_dims was not given, so dim 2 of (B, ., .) is split, and the first layers "
                "take it for features: each rank computes the rest whole, and the domain saves "
                f"little. To split the sequence, write shard_dims={features}."
            )

    def explain(self, error: BaseException) -> None:
        """Add the shard_dims to try to a refusal that the default dims have caused."""
        words = r"split channels|features of \w+ are split|all (steps|features)"
        found = re.search(words, str(error))
        if not found or not isinstance(error, UnsupportedOperationError):
            return
        split = {name: g for name, g in self._guessed.items() if g.dims}
        spatial = next((g.shape[3:] for g in split.values() if len(g.shape) > 4), ())
        wanted: dict[str, int | list[int]] = {}
        for name, g in self._guessed.items():
            if spatial and g.shape[1:][-len(spatial) :] == spatial:
                first = len(g.shape) - len(spatial)
                dims = list(range(first, first + max(len(s.dims) for s in split.values())))
            elif name in split:
                dims = [0 if found[1] else 1] if len(g.shape) == 3 else list(g.dims)
            else:
                continue
            wanted[name] = dims if len(dims) > 1 else dims[0]
        if split:
            shown = ", ".join(f"{n!r} {g.shape}: {list(g.dims)}" for n, g in split.items())
            error.add_note(
                f"shard_dims was not given, so these dims were split: {shown}. For entries "
                f"(B, T, C, *spatial) or (B, T, C) name others, such as shard_dims={wanted}."
            )


@dataclass(frozen=True)
class _Guess:
    """Holds the shape of a batch entry, and the dims of it that are split."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def is_of_features(self, module: nn.Module) -> bool:
        """Return whether layers of the module take dim 2 of (B, ., .) for features."""
        if len(self.shape) != 3 or self.dims != (2,):
            return False
        _, channels, features = self.shape
        layers = list(module.modules())
        if any(getattr(m, "in_channels", None) == channels for m in layers):
            return False
        names = ("in_features", "input_size", "embed_dim")
        taken = [n for m in layers for name in names if isinstance(n := vars(m).get(name), int)]
        return taken[:1] == [features]


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
