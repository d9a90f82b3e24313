"""Ranks the ways to train on a cluster, as a table and a config for `fit`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.data.atomic import disk_errors
from lightning_shard.lab.calibrate import aligned
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.prediction import Prediction
from lightning_shard.lab.run import Mesh
from lightning_shard.lab.timeline import HOST_RATES
from lightning_shard.processes.mesh import Sharding

NAME = "plan"
SHOWN = 12
GIB = 2**30
STATES = ("parameters", "gradients", "optimizer", "gathered")  # equal for fields of all sizes
TIMES = {  # the parts of a step in words
    "compute": "compute",
    "exchange": "exchange of fields",
    "link": "link to the host",
    "parameters_traffic": "traffic of parameters",
}
NOTHING_FITS = "Nothing fits: take smaller fields or batches, or more devices."
NOT_YET = "Nothing that was tried fits, and there was no time for the rest: let nothing else run."
HEAD = ("mesh", "sharding", "activations", "s/step", "samples/s", "GiB", "limited by", "cost/epoch")


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        mesh: The number of data replicas, and of ranks along each split dim.
        sharding: The mode of `ShardingOptions`.
        activation_checkpointing: If true, activations of blocks are computed again in backward.
        activation_offload: If true, they lie in the host's memory until backward.
        in_turns: True if the ranks are tiles, which take turns on the one device.
    """

    mesh: Mesh
    sharding: Sharding = "full"
    activation_checkpointing: bool = False
    activation_offload: bool = False
    in_turns: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks that share a sample."""
        return math.prod(self.mesh[1:])

    @property
    def name(self) -> str:
        """The mesh or the tiles, in words."""
        return f"{_by(self.mesh[1:])} tiles" if self.in_turns else _by(self.mesh)

    @property
    def kept(self) -> str:
        """The fate of the activations of blocks, in words."""
        if self.in_turns:
            return "on the host"
        if self.activation_checkpointing:
            return "computed again"
        return "offloaded" if self.activation_offload else "kept"


@dataclass(frozen=True)
class Candidate:
    """A setting, and its prediction.

    Attributes:
        setting: The way to train.
        forecast: The prediction of one step.
        memory_of_device: The bytes that a device has.
    """

    setting: Setting
    forecast: Prediction
    memory_of_device: int

    @property
    def rate(self) -> float:
        """Samples a second of all replicas."""
        return self.forecast.samples / self.forecast.seconds

    @property
    def fits(self) -> bool:
        """True if a device has the memory."""
        return self.forecast.memory <= self.memory_of_device

    @property
    def limit(self) -> str:
        """The largest part of the step, or "memory"."""
        parts = {words: getattr(self.forecast, name) for name, words in TIMES.items()}
        name = max(parts, key=lambda part: parts[part])
        share = parts[name] / self.forecast.seconds if self.forecast.seconds else 0.0
        return f"{name} {share:.0%}" if self.fits else "memory"

    @property
    def states(self) -> int:
        """The bytes that a larger field does not change."""
        return sum(self.forecast.memory_by_cause.get(name, 0) for name in STATES)

    @property
    def growth(self) -> float:
        """The factor by which a field may have more points until the memory is full."""
        return (self.memory_of_device - self.states) / max(self.forecast.memory - self.states, 1)


@dataclass
class Ranking:
    """The settings that `best` tried; `print` it, or `save` it.

    Attributes:
        cluster: The machines.
        candidates: Settings that fit, the fastest first.
        too_large: Settings that do not fit into a device's memory.
        refused: The reason for which a mesh cannot train this module, by mesh.
        slower: Meshes that could not be faster than one that fits, even without any exchange.
        not_tried: Meshes for which there was no time.
        extents: The extents of the field along the dims that may be split.
        samples: The number of samples in one epoch; 0 where the data does not say.
    """

    cluster: Cluster
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    too_large: list[Candidate] = field(default_factory=list[Candidate])
    refused: dict[Mesh, str] = field(default_factory=dict[Mesh, str])
    slower: list[Mesh] = field(default_factory=list[Mesh])
    not_tried: list[Mesh] = field(default_factory=list[Mesh])
    extents: tuple[int, ...] = ()
    samples: int = 0

    @property
    def largest(self) -> tuple[Candidate, tuple[int, ...]] | None:
        """The setting that fits the largest field, and the extents of that field."""
        found = max((*self.candidates, *self.too_large), key=lambda c: c.growth, default=None)
        if found is None or found.growth <= 0 or not self.extents:
            return None
        factor = found.growth ** (1 / len(self.extents))
        return found, tuple(int(extent * factor) for extent in self.extents)

    def cost_of_epoch(self, candidate: Candidate) -> float | None:
        """Return the price of an epoch; None where that of a device or the samples are unknown."""
        if self.cluster.price is None or not self.samples:
            return None
        return self.cluster.price * self.cluster.devices * self.samples / candidate.rate / 3600

    def save(self, folder: str | Path) -> Path:
        """Write the table `plan.txt` and, if a setting fits, the config `plan.yaml`.

        Returns:
            The path of the config, or the folder where nothing fits.
        """
        path = Path(folder)
        with disk_errors(path / f"{NAME}.txt"):
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{NAME}.txt").write_text(f"{self}\n", encoding="utf-8")
            if not self.candidates:
                return path
            (path / f"{NAME}.yaml").write_text(overlay(self), encoding="utf-8")
        return path / f"{NAME}.yaml"

    def __str__(self) -> str:
        cluster, ranked = self.cluster, self.candidates[:SHOWN]
        lines = [cluster.origin, f"{cluster.devices} devices: {cluster}", ""]
        if ranked:
            lines += aligned([HEAD, *(self._row(each) for each in ranked)])
        else:
            lines.append(NOT_YET if self.not_tried else NOTHING_FITS)
        if cluster.price is None and ranked:
            lines.append("cost/epoch needs --price, of one device for an hour.")
        return "\n".join(lines + self._notes())

    def _row(self, each: Candidate) -> tuple[str, ...]:
        cost = self.cost_of_epoch(each)
        return (
            each.setting.name,
            each.setting.sharding,
            each.setting.kept,
            f"{each.forecast.seconds:.3g}",
            f"{each.rate:.3g}",
            f"{each.forecast.memory / GIB:.1f}",
            each.limit,
            "" if cost is None else f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}",
        )

    def _notes(self) -> list[str]:
        """Return lines on the largest field, and on meshes that are not in the table."""
        lines: list[str] = []
        if largest := self.largest:
            candidate, extents = largest
            setting = candidate.setting
            lines.append(
                f"The largest field that fits: about {_by(extents)} instead of {_by(self.extents)},"
                f" on {setting.name} with activations {setting.kept}."
            )
        fits = {each.setting.mesh for each in self.candidates if not each.setting.in_turns}
        in_turns = [each for each in self.too_large if each.setting.in_turns]
        meshes = dict.fromkeys(e.setting.mesh for e in self.too_large if e not in in_turns)
        if names := [_by(mesh) for mesh in meshes if mesh not in fits]:
            size = self.cluster.device.memory / GIB
            lines.append(f"Does not fit into {size:.1f} GiB: {', '.join(names)}.")
        lines += [_host_note(each) for each in self.candidates if each.forecast.on_host]
        lines += [f"{_by(mesh)} cannot train it: {why}" for mesh, why in self.refused.items()]
        if self.slower:
            names = ", ".join(map(_by, self.slower))
            lines.append(f"Cannot be faster, even without any exchange: {names}.")
        if self.not_tried:
            lines.append(f"No time was left for {', '.join(map(_by, self.not_tried))}.")
        return lines


def overlay(found: Ranking) -> str:
    """Return a config with the fastest setting, to be given to `fit` after the run's own.

    Raises:
        ValueError: Nothing fits.
    """
    if not found.candidates:
        raise ValueError("no setting fits into the memory of a device; there is nothing to write.")
    best = found.candidates[0]
    setting, cluster = best.setting, found.cluster
    domain = list(setting.mesh[1:])
    sharding: dict[str, Any] = {"mode": setting.sharding}
    if setting.activation_checkpointing:
        sharding["activation_checkpointing"] = True
    if setting.activation_offload:
        sharding["activation_offload"] = True
    sizes = domain if len(domain) > 1 else domain[0]
    if setting.in_turns:
        name, arguments = "TiledStrategy", {"tiles": sizes, "sharding": sharding}
    else:
        name = "HybridShardStrategy"
        arguments = {
            "data_parallel_size": setting.mesh[0],
            "domain_parallel_size": sizes,
            "sharding": sharding,
        }
    strategy = {"class_path": f"lightning_shard.{name}", "init_args": arguments}
    trainer = {"devices": cluster.per_node, "num_nodes": cluster.nodes, "strategy": strategy}
    head = (
        f"# Written by plan --best for {cluster}:\n"
        f"# {best.rate:.3g} samples/s predicted, limited by {best.limit}.\n"
    )
    return head + yaml.safe_dump({"trainer": trainer}, sort_keys=False, default_flow_style=None)


def _host_note(each: Candidate) -> str:
    forecast = each.forecast
    moved = forecast.to_host + forecast.from_host
    times = ", ".join(f"{name} {moved / rate:.2g} s" for name, rate in HOST_RATES.items())
    verb, other = ("keep", "move") if each.setting.in_turns else ("keeps", "moves")
    return (
        f"{each.setting.name} {verb} {forecast.on_host / GIB:.3g} GiB on the host, and {other} "
        f"{moved / GIB:.3g} GiB in a step: {times}."
    )


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
