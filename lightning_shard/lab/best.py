"""Finds the mesh, and what is kept in memory, with which a cluster trains fastest."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_shard.data.split import ShardDims
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lab.batches import Data, first_batches
from lightning_shard.lab.course import Mesh, samples_of
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.meshes import extents_of, meshes
from lightning_shard.lab.predict import Prediction, predict
from lightning_shard.processes.mesh import Sharding

OTHER_MODES: tuple[Sharding, ...] = ("gradients", "none", "hybrid")
TRIED_IN_ALL_MODES = 3  # of the fastest meshes
FOR_MESHES = 0.8  # of the time; the rest is for modes
STATES = ("parameters", "gradients", "optimizer", "gathered")  # which no field makes larger


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        mesh: Data replicas, and the ranks along each split dim.
        sharding: The mode of `ShardingOptions`.
        activation_checkpointing: Whether activations of blocks are computed again in backward.
        activation_offload: Whether they lie in the host's memory until backward.
    """

    mesh: Mesh
    sharding: Sharding = "full"
    activation_checkpointing: bool = False
    activation_offload: bool = False

    @property
    def ranks(self) -> int:
        """That share a sample."""
        return math.prod(self.mesh[1:])

    @property
    def kept(self) -> str:
        """What becomes of the activations of blocks."""
        if self.activation_checkpointing:
            return "computed again"
        return "offloaded" if self.activation_offload else "kept"


@dataclass(frozen=True)
class Candidate:
    """A setting, and what is predicted of it."""

    setting: Setting
    forecast: Prediction
    memory_of_device: int

    @property
    def rate(self) -> float:
        """Samples a second, of all replicas."""
        return self.forecast.samples / self.forecast.seconds

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.forecast.memory <= self.memory_of_device

    @property
    def limit(self) -> str:
        """What takes most of the step."""
        parts = {
            "compute": self.forecast.compute,
            "exchange of fields": self.forecast.exchange,
            "traffic of parameters": self.forecast.parameters_traffic,
        }
        name = max(parts, key=lambda part: parts[part])
        share = parts[name] / self.forecast.seconds if self.forecast.seconds else 0.0
        return f"{name} {share:.0%}" if self.fits else "memory"

    @property
    def growth(self) -> float:
        """How many times more points a field may have until the memory is full."""
        states = sum(self.forecast.bytes_by_cause.get(name, 0) for name in STATES)
        return (self.memory_of_device - states) / max(self.forecast.memory - states, 1)


@dataclass
class Ranking:
    """What `best` found; `print` it, or `save` it.

    Attributes:
        cluster: Where it is to run.
        candidates: Those that fit, the fastest first.
        too_large: Those that do not fit into a device's memory.
        refused: Why a mesh cannot train this module, by mesh.
        slower: Meshes that could not be faster than one that fits, even without any exchange.
        not_tried: Meshes for which there was no time.
        extents: Of the field along the dims that may be split.
        samples: Of one epoch; 0 where the data does not say.
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
        """What all devices cost for an epoch; None where price or samples are unknown."""
        if self.cluster.price is None or not self.samples:
            return None
        return self.cluster.price * self.cluster.devices * self.samples / candidate.rate / 3600


def best(
    module: LightningModule,
    data: Data,
    cluster: Cluster,
    shard_dims: ShardDims = None,
    *,
    predict: Callable[..., Prediction] = predict,
    seconds: float = 33.0,
    **trainer: Any,
) -> Ranking:
    """Rank meshes, sharding modes, and what is kept of activations, by samples a second.

    Each mesh is predicted with parameters sharded over all ranks, and with all activations kept.
    Where that does not fit, activations are computed again, or offloaded. A setting is not
    predicted whose share of the activations of a smaller domain is already too large, nor a split
    along several dims where as many ranks along one dim would be slower than another mesh if they
    exchanged nothing. The fastest meshes are predicted with the other sharding modes.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica.
        cluster: Where it is to run.
        shard_dims: As for `HybridShardStrategy`.
        predict: Predicts a step, as the function of that name.
        seconds: After which no further mesh is tried.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.
    """
    batch = first_batches(module, data, "fit")[0]
    extents = extents_of(batch, shard_dims)
    search = _Search(module, data, cluster, shard_dims, predict, trainer)
    found = Ranking(cluster, extents=extents, samples=_samples_of_epoch(data, batch))
    begin = time.monotonic()

    def is_late() -> bool:
        return time.monotonic() > begin + FOR_MESHES * seconds

    lines, blocks = _in_order(meshes(cluster.devices, extents))
    for mesh in lines:
        if is_late():
            found.not_tried.append(mesh)
        else:
            search.try_kept(mesh)
    for mesh in lines:
        if not is_late():
            search.save_memory(mesh)
    for mesh in blocks:
        if search.cannot_win(mesh):
            found.slower.append(mesh)
        elif is_late():
            found.not_tried.append(mesh)
        else:
            search.try_kept(mesh)
            search.save_memory(mesh)
    for setting in _in_other_modes(search.fitting, cluster):
        if time.monotonic() <= begin + seconds:
            search.try_setting(setting)
    found.candidates, found.refused = search.fitting, search.refused
    found.too_large = [each for each in search.tried if not each.fits]
    return found


def _samples_of_epoch(data: Data, batch: Any) -> int:
    loader: Any = data.train_dataloader() if isinstance(data, LightningDataModule) else data
    try:
        return len(loader) * samples_of(batch)
    except TypeError:  # of a stream
        return 0


def _in_order(all_meshes: list[Mesh]) -> tuple[list[Mesh], list[Mesh]]:
    """Splits along one dim, of which the smallest and the largest domain say most, and others."""
    lines = [mesh for mesh in all_meshes if len(mesh) == 2]
    return [*lines[:1], *lines[:0:-1][:1], *lines[1:-1]], [m for m in all_meshes if len(m) > 2]


def _in_other_modes(fastest: Iterable[Candidate], cluster: Cluster) -> list[Setting]:
    modes = OTHER_MODES if cluster.nodes > 1 else OTHER_MODES[:-1]  # hybrid: copies in each node
    first = [each.setting for each in fastest][:TRIED_IN_ALL_MODES]
    return [replace(setting, sharding=mode) for setting in first for mode in modes]


class _Search:
    """Predicts settings, and remembers what came of it."""

    def __init__(self, *asked: Any) -> None:
        self.module, self.data, self.cluster, self.shard_dims, self.predict, self.trainer = asked
        self.tried: list[Candidate] = []
        self.refused: dict[Mesh, str] = {}

    @property
    def fitting(self) -> list[Candidate]:
        return sorted((each for each in self.tried if each.fits), key=lambda c: -c.rate)

    def try_kept(self, mesh: Mesh) -> None:
        """With all activations kept, unless that cannot fit."""
        if self._may_fit(Setting(mesh)):
            self.try_setting(Setting(mesh))

    def save_memory(self, mesh: Mesh) -> None:
        """Try what needs less memory, of a mesh that does not fit with all activations kept."""
        kept = Setting(mesh)
        if any(each.setting == kept and each.fits for each in self.tried):
            return
        ways = [
            replace(kept, activation_checkpointing=True),
            replace(kept, activation_offload=True),
        ]
        for way in filter(self._may_fit, ways):
            self.try_setting(way)

    def try_setting(self, setting: Setting) -> bool:
        """Whether it fits, or cannot train at all."""
        if setting.mesh in self.refused:
            return True
        try:
            forecast = self.predict(
                self.module, self.data, self.cluster, setting.mesh, self.shard_dims,
                sharding=setting.sharding,
                activation_checkpointing=setting.activation_checkpointing,
                activation_offload=setting.activation_offload, **self.trainer,
            )  # fmt: skip
        except (UnsupportedOperationError, ValueError) as error:
            self.refused[setting.mesh] = str(error)
            return True
        self.tried.append(Candidate(setting, forecast, self.cluster.device.memory))
        return self.tried[-1].fits

    def cannot_win(self, mesh: Mesh) -> bool:
        """Whether as many ranks along fewer dims would lose if they exchanged nothing."""
        wins = max((each.rate for each in self.tried if each.fits), default=0.0)
        alike = [
            each.forecast for each in self.tried
            if each.setting.ranks == math.prod(mesh[1:]) and len(each.setting.mesh) < len(mesh)
            and each.fits
        ]  # fmt: skip
        loses = [one.samples <= wins * (one.seconds - one.exchange) for one in alike]
        return bool(loses) and all(loses)

    def _may_fit(self, setting: Setting) -> bool:
        """Whether its share of what a smaller domain held could fit."""
        alike = [
            each for each in self.tried
            if replace(each.setting, mesh=setting.mesh) == setting and not each.fits
        ]  # fmt: skip
        return all(_share(each, setting.ranks) <= each.memory_of_device for each in alike)


def _share(candidate: Candidate, ranks: int) -> float:
    states = sum(candidate.forecast.bytes_by_cause.get(name, 0) for name in STATES)
    return states + (candidate.forecast.memory - states) * candidate.setting.ranks / ranks
