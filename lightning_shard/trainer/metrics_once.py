"""Makes metrics and rates count each sample once, though all ranks of a domain see it."""

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from torchmetrics import Metric

from lightning_shard.trainer.host import callbacks_of, throughputs


def count_domains_once(
    trainer: Trainer, module: LightningModule, data_group: dist.ProcessGroup | None, replicas: int
) -> None:
    """Let metrics and throughput monitors add up over data replicas, not over all ranks.

    A torchmetrics metric that was given a process group keeps it.
    """
    callbacks = callbacks_of(trainer)
    kept = (value for callback in callbacks for value in vars(callback).values())
    for metric in (*module.modules(), *kept):
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = data_group
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs(callback):
                throughput.world_size = replicas
