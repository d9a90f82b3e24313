"""Predicts which sizes of `activation_offload` make a step longer, and by how much."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.lab.batches import Data
from lightning_shard.lab.calibrate import aligned
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.predict import predict
from lightning_shard.lab.prediction import Prediction
from lightning_shard.lab.run import Mesh
from lightning_shard.lightning import LightningModule
from lightning_shard.memory.sizes import size_in_words

SHARES = 0.8, 0.6, 0.4, 0.3, 0.2, 0.1  # parts of what forward keeps for backward
LONGER = 1.05  # times the step without a size: no more than a prediction errs

_HEAD = "size", "peak memory", "step", "times", "to the host", "from the host"


@dataclass(frozen=True)
class OffloadSizes:
    """Steps of one rank with sizes of `activation_offload`; `print` them.

    Attributes:
        kept: The step whose activations all stay on the device.
        sizes: The step with each size, as `activation_offload` takes it; the largest size first.
    """

    kept: Prediction
    sizes: dict[str, Prediction]

    def times(self, size: str) -> float:
        """Return the time of a step with a size over that without one."""
        return self.sizes[size].seconds / self.kept.seconds

    @property
    def free(self) -> str | None:
        """The smallest size that costs next to nothing, as all larger ones; None if there is none.

        It makes a step at most 5 % longer, and takes less memory.
        """
        fits = [*takewhile(lambda size: self.times(size) <= LONGER, self.sizes)]
        is_less = fits and self.sizes[fits[-1]].memory < self.kept.memory
        return fits[-1] if is_less else None

    def __str__(self) -> str:
        where = self.kept.cluster
        assert where is not None
        lines = [where.origin, f"activation_offload on {where}:", *aligned([_HEAD, *self._rows()])]
        if self.free is None:
            return "\n".join([*lines, "Each size makes a step more than 5 % longer."])
        saved = size_in_words(self.kept.memory - self.sizes[self.free].memory)
        longer = 100 * max(0.0, self.times(self.free) - 1)
        lines.append(f"{self.free} takes {saved} less, and makes a step {longer:.0f} % longer.")
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for size, found in {"all": self.kept, **self.sizes}.items():
            yield (
                size,
                size_in_words(found.memory),
                f"{1e3 * found.seconds:.1f} ms",
                f"{found.seconds / self.kept.seconds:.2f}",
                size_in_words(found.to_host),
                size_in_words(found.from_host),
            )


def offload_sizes(
    module: LightningModule,
    data: Data,
    mesh: int | str | Mesh = 1,
    cluster: Cluster | str = "1xH100",
    *,
    sharding: Any = "auto",
    **options: Any,
) -> OffloadSizes:
    """Predict a training step for sizes from 80 to 10 % of the activations.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches.
        mesh: The ranks, as for `plan`.
        cluster: The machines, such as "1xH100".
        sharding: The mode of `ShardingOptions`, or such options.
        options: Further arguments of `plan`.

    Raises:
        ValueError: The mesh has another number of ranks than the cluster has devices, or the
            options compile blocks.
    """
    where = read_cluster(cluster) if isinstance(cluster, str) else cluster
    given = sharding if isinstance(sharding, ShardingOptions) else ShardingOptions(sharding)

    def step(size: str | bool) -> Prediction:
        chosen = replace(given, activation_offload=size)
        return predict(module, data, mesh, where, sharding=chosen, **options)

    kept = step(False)
    sizes = [_size(share * kept.activations) for share in SHARES]
    return OffloadSizes(kept, {size: step(size) for size in dict.fromkeys(sizes)})


def _size(count: float) -> str:
    """Return bytes as `activation_offload` takes them, with three digits."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.3g}{name}"
