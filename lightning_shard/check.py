"""Does a module give on several processes what it gives on one? A rehearsal of one step says so."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_shard.batch import ShardDims
from lightning_shard.rehearsal import Data, Rehearsal, rehearse

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the loss and of gradients
NARROW = 5e-2  # of those in narrower dtypes
NEGLIGIBLE = 1e-3  # a parameter's share of the gradient below which it is compared with that share


@dataclass
class Check:
    """What a check found; `print` it.

    Attributes:
        domain: Ranks along each split dim.
        refused: The sentence with which the step stopped, if it did.
        gathered: Functions without a rule for split tensors, by name.
        loss: Of one process.
        loss_difference: Of the loss on several, relative.
        gradient_differences: For each parameter and buffer, relative, the largest first.
        tolerance: Up to which differences are those of rounding.
        rounding: The largest difference in the module's own precision, where that left a doubt and
            the comparison is one in float64; else 0.
    """

    domain: tuple[int, ...]
    refused: str = ""
    gathered: list[str] = field(default_factory=list)
    loss: float = 0.0
    loss_difference: float = 0.0
    gradient_differences: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    rounding: float = 0.0

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return max([self.loss_difference, *self.gradient_differences.values()])

    @property
    def is_exact(self) -> bool:
        """Whether the step ran, and gave loss and gradients of one process."""
        return not self.refused and self.worst <= self.tolerance

    @property
    def is_supported(self) -> bool:
        """Whether nothing was gathered either."""
        return self.is_exact and not self.gathered

    def __str__(self) -> str:
        ranks = f"{'x'.join(map(str, self.domain))} ranks"
        lines = []
        if self.gathered:
            lines += ["Without a rule for split tensors, computed on gathered ones:"]
            lines += [f"  {name}" for name in self.gathered]
        if self.refused:
            return "\n".join([*lines, f"On {ranks} the step stopped: {self.refused}"])
        name, difference = next(iter(self.gradient_differences.items()))
        verdict = "equals" if self.is_exact else "DIFFERS FROM"
        lines += [
            f"One training step on {ranks} {verdict} that of one process:",
            f"  loss       {self.loss:.6g}, relative difference {self.loss_difference:.1e}",
            f"  gradients  of {len(self.gradient_differences)} parameters and buffers, relative "
            f"difference at most {difference:.1e} ({name})",
        ]
        if self.rounding:
            lines += [
                f"  These are of float64, since {self.rounding:.1e} in the module's own precision "
                "left a doubt."
            ]
        if not self.is_exact:
            lines += [
                f"  More than {self.tolerance:.0e} is not rounding. Random numbers other than "
                "torch's dropout, or code that looks at one rank's part, can be the cause."
            ]
        elif self.gathered:
            lines += [
                "It is exact, but gathering costs memory and traffic: train inside "
                "`with lightning_shard.allow_gather():`, or register rules (docs/autograd.md)."
            ]
        return "\n".join(lines)


def check(
    module: LightningModule,
    data: Data,
    domain_parallel_size: int | Sequence[int] = 2,
    shard_dims: ShardDims = None,
    **trainer: Any,
) -> Check:
    """Train one step in one process and on the ranks of a domain on this machine, and compare.

    Args:
        module: An ordinary LightningModule, which stays as it is. Try a small one: all of it is
            computed on the CPU of this machine.
        data: A data module, or a DataLoader of training batches.
        domain_parallel_size: Ranks that share each sample, or one number for each split dim.
        shard_dims: As of `HybridShardStrategy`.
        trainer: Arguments of the Trainer, such as `precision="64-true"`.

    Returns:
        What was found. Functions without a rule are all named, and not only the first one.
    """
    sizes = domain_parallel_size
    domain = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    found = _compare(module, data, domain, shard_dims, trainer)
    if found.refused or found.is_exact or "precision" in trainer:
        return found
    try:  # sums that nearly cancel differ by more than any tolerance for float32
        double = _compare(module, data, domain, shard_dims, {**trainer, "precision": "64-true"})
    except ProcessRaisedException:  # not every module computes in float64
        return found
    double.rounding = found.worst
    return double


def _compare(
    module: LightningModule,
    data: Data,
    domain: tuple[int, ...],
    shard_dims: ShardDims,
    trainer: dict[str, Any],
) -> Check:
    (alone,) = rehearse(module, data, (), shard_dims, **trainer)
    return compared(alone, rehearse(module, data, domain, shard_dims, **trainer), domain)


def compared(alone: Rehearsal, ranks: Sequence[Rehearsal], domain: tuple[int, ...]) -> Check:
    """The difference between one process and the ranks of a domain."""
    first = ranks[0]
    found = Check(domain, first.refused, first.gathered, alone.loss or 0.0)
    if found.refused:
        return found
    dtypes = {v.dtype for v in alone.gradients.values() if v.is_floating_point()}
    found.tolerance = max(TOLERANCE.get(dtype, NARROW) for dtype in dtypes | {torch.float64})
    found.loss_difference = abs((first.loss or 0.0) - found.loss) / max(abs(found.loss), 1e-30)
    total = _norm(torch.stack([torch.tensor(_norm(v)) for v in alone.gradients.values()]))
    differences = {}
    for name, value in alone.gradients.items():
        scale = max(_norm(value), NEGLIGIBLE * total, 1e-30)
        differences[name] = _norm(first.gradients[name] - value) / scale
    ordered = sorted(differences.items(), key=lambda item: -item[1])
    found.gradient_differences = dict(ordered)
    return found


def _norm(x: Tensor) -> float:
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    return float(torch.linalg.vector_norm(wide))
