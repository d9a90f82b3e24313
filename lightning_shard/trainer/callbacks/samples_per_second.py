"""Shows global samples per second in the progress bar."""

import time
from collections import deque
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_shard.data.tree import leaves_of
from lightning_shard.lightning import Callback, LightningModule, Trainer, extract_batch_size

WINDOW = 10  # batches


class SamplesPerSecond(Callback):
    """Shows the samples that all processes train on per second, in tqdm's and rich's bar alike.

    Samples are counted once, however many ranks of a domain share each; the rate is that of the
    last 10 batches, and goes to the loggers as well.
    """

    def __init__(self) -> None:
        """Begin without a batch."""
        self._ends: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new window, since what lies between epochs is no training."""
        self._ends.clear()  # time between epochs is no training
        self._ends.append((time.perf_counter(), 0))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a window inside of an epoch, where a resumed run has none."""
        if not self._ends:
            self._ends.append((time.perf_counter(), 0))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the rate of the batches in the window."""
        self._ends.append((time.perf_counter(), samples_of_all(trainer, batch)))
        elapsed = self._ends[-1][0] - self._ends[0][0]
        rate = sum(n for _, n in list(self._ends)[1:]) / elapsed
        pl_module.log("samples/s", rate, prog_bar=True, batch_size=1)


def samples_of_all(trainer: Trainer, batch: Any) -> int:
    """Count the samples that all data replicas train on while this rank trains on `batch`."""
    replicas = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
    return _samples(batch) * replicas["num_replicas"]


def _samples(batch: Any) -> int:
    """Count samples as Lightning does, but not characters where a batch is a list of texts."""
    sizes = (x.shape[0] for x in leaves_of(batch) if isinstance(x, Tensor) and x.ndim)
    size = next(sizes, None)
    return extract_batch_size(batch) if size is None else size
