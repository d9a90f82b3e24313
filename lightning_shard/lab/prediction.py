"""Holds what `plan` predicts of one training step, and prints it as a table."""

import math
from dataclasses import dataclass

from lightning_shard.lab.machine import RUN_HERE, Cluster
from lightning_shard.lab.run import Mesh
from lightning_shard.lab.timeline import HOST_RATES
from lightning_shard.memory.sizes import size_in_words
from lightning_shard.trainer.split_summary import SplitSummary

_NOTES = {
    "parameters": "those that this rank holds, and buffers",
    "gradients": "of these parameters",
    "optimizer": "its states of these parameters",
    "gathered": "whole parameters and gradients of blocks",
    "activations": "kept from forward for backward",
    "temporary": "results that are soon given back",
    "workspaces": "what kernels take beside their tensors",
    "waiting": "of waiting tiles: small tensors, and what their budget keeps",
}


@dataclass(frozen=True)
class Prediction:
    """One training step of the rank that holds and exchanges most; `print` it.

    Attributes:
        mesh: The number of data replicas, and of ranks along each split dim.
        cluster: The machines on which it would run; None: its time is not predicted.
        split: The entries of the batch that are split over a domain, and those that stay whole.
        samples: The number of samples in one step of all replicas.
        memory: The peak of bytes in tensors, and of what kernels of the cluster's device take
            beside them.
        peak_at: The part of the step in which that is reached.
        memory_by_cause: The bytes of the peak by their cause: "parameters", "gradients",
            "optimizer", "gathered", "activations", "batch", "workspaces" and "temporary".
        activations: Bytes that forward keeps for backward.
        sent_for_parameters: Bytes of parameters and gradients that the rank sends.
        sent_for_fields: Bytes that it sends within its domain: halos, modes and sums.
        is_measured: True if the step ran on real tensors, since it needs numbers.
        alone: The peak of bytes of one process without any sharding; None if it was not traced.
        in_turns: True if the ranks are tiles, which take turns on one device. Bytes and seconds of
            the step are then those of the device; other bytes are those of one tile.
        on_host: The most bytes that wait on the host: of all tiles, or of offloaded activations.
        to_host: Bytes that leave the device for it in a step.
        from_host: Bytes that come back.
        seconds: The time of the step; NaN without a cluster, as the times below.
        compute: Seconds of computation.
        exchange: Seconds of waiting for fields.
        link: Seconds of waiting for what comes from the host or goes there; the batch, too.
        parameters_traffic: Seconds of waiting for parameters and their gradients.
        overlapped: Seconds of collectives and of copies that pass during computation.
        by_rates: The operators that took the rates of the device, since their kernels could not be
            run alone.
    """

    mesh: Mesh
    cluster: Cluster | None
    split: SplitSummary
    samples: int
    memory: int
    peak_at: str
    memory_by_cause: dict[str, int]
    activations: int
    sent_for_parameters: int
    sent_for_fields: int
    is_measured: bool = False
    alone: int | None = None
    in_turns: bool = False
    on_host: int = 0
    to_host: int = 0
    from_host: int = 0
    seconds: float = math.nan
    compute: float = math.nan
    exchange: float = math.nan
    link: float = math.nan
    parameters_traffic: float = math.nan
    overlapped: float = math.nan
    by_rates: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """All bytes that the rank sends."""
        return self.sent_for_parameters + self.sent_for_fields

    def fits(self, cluster: Cluster) -> bool:
        """Return whether a device of the cluster has the memory."""
        return self.memory <= cluster.device.memory

    def __str__(self) -> str:
        ranks, cluster, several = math.prod(self.mesh[1:]), self.cluster, math.prod(self.mesh) > 1
        lines = [] if cluster is None else [cluster.origin]
        lines += [str(self.split)] if ranks > 1 else []
        if ranks > 1 and not self.split.split:
            lines.append(f"Warning: {self.split.advice(ranks)}")
        replicas = f"{self.mesh[0]} data replica{'s' * (self.mesh[0] > 1)}"
        shape = f"{replicas} x {'x'.join(map(str, self.mesh[1:]))} domain ranks"
        place = "" if cluster is None else f" of {cluster}"
        what = f"One of {math.prod(self.mesh)} ranks ({shape})" if several else "One process"
        if self.in_turns:
            what = f"{'x'.join(map(str, self.mesh[1:]))} tiles in turns on one device"
        lines.append(f"{what}{place}, in one training step:")
        rows = self._times() + self._memory() + self._traffic()
        lines += [f"  {a:<17} {b:>10}   {c}".rstrip() for a, b, c in rows]
        if self.by_rates:
            names = ", ".join(self.by_rates)
            lines.append(f"By the rates of the device, since they could not be run here: {names}.")
        if self.is_measured:
            lines.append("This was measured on real tensors: the step needs their numbers.")
        return "\n".join(lines)

    def _times(self) -> list[tuple[str, str, str]]:
        if (cluster := self.cluster) is None:
            return []
        rate = self.samples / self.seconds if self.seconds else math.inf
        was_run = cluster.device.source.startswith(RUN_HERE)
        how = "as they were timed" if was_run else "at the rates of the device"
        rows = [
            ("step", _milliseconds(self.seconds), f"{rate:.3g} samples/s"),
            ("  compute", _milliseconds(self.compute), f"kernels {how}"),
        ]
        if not self.in_turns:
            fields = _milliseconds(self.exchange)
            rows.append(("  fields", fields, "waiting for halos, modes and sums"))
        if self.on_host or self.link:
            note = "nothing hidden" if self.in_turns else "waiting for copies"
            note = f"{_link_of(cluster)}, {note}" if self.on_host else "waiting for the batch"
            rows.append(("  link", _milliseconds(self.link), note))
        return [
            *rows,
            (
                "  parameters",
                _milliseconds(self.parameters_traffic),
                "waiting for the mean of gradients, or shards",
            ),
            ("hidden", _milliseconds(self.overlapped), "travels during computation"),
        ]

    def _memory(self) -> list[tuple[str, str, str]]:
        note = f"in {self.peak_at}"
        if self.cluster is not None:
            verb = "fits" if self.fits(self.cluster) else "does not fit"
            note += f"; {verb} into {size_in_words(self.cluster.device.memory)}"
        if self.alone is not None and (math.prod(self.mesh) > 1 or self.in_turns):
            note += f"; {size_in_words(self.alone)} in one process"
        causes = sorted(self.memory_by_cause.items(), key=lambda pair: -pair[1])
        notes = _NOTES | {"batch": self._batch_note()}
        return [
            ("peak memory", size_in_words(self.memory), note),
            *((f"  {cause}", size_in_words(size), notes[cause]) for cause, size in causes),
        ]

    def _batch_note(self) -> str:
        if not self.split.split:
            return "all of each sample"
        share = f"1/{math.prod(self.mesh[1:])} of"
        return f"{share} each sample" if not self.split.whole else f"{share} what is split"

    def _traffic(self) -> list[tuple[str, str, str]]:
        rows: list[tuple[str, str, str]] = []
        if self.in_turns or self.on_host:
            moved = self.to_host + self.from_host
            times = (f"{name} {moved / rate:.2g} s" for name, rate in HOST_RATES.items())
            note = "or files: what waits, of all tiles" if self.in_turns else "pinned: activations"
            rows += [
                ("host memory", size_in_words(self.on_host), note),
                ("to the host", size_in_words(self.to_host), "per step"),
                ("from the host", size_in_words(self.from_host), f"both: {', '.join(times)}"),
            ]
        if self.in_turns or math.prod(self.mesh) == 1:
            return rows
        parameters = size_in_words(self.sent_for_parameters)
        rows.append(("sent: parameters", parameters, "per step, over all ranks"))
        if math.prod(self.mesh[1:]) > 1:
            rows.append(
                ("sent: fields", size_in_words(self.sent_for_fields), "per step, in the domain")
            )
        return rows


def _link_of(cluster: Cluster) -> str:
    """Name the link between a device and its host."""
    rates = {rate: name for name, rate in HOST_RATES.items()}
    return rates.get(cluster.device.host_rate, "the link of the device")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
