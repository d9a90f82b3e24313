"""Searches the meshes of a cluster, and what is kept in memory, for the fastest training."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_shard.data.split import ShardDims
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lab.batches import Data, first_batches
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.extents import extents_of
from lightning_shard.lab.least_tiles import fewest
from lightning_shard.lab.machine import Cluster
from lightning_shard.lab.own_kernels import own_kernels
from lightning_shard.lab.predict import predict
from lightning_shard.lab.ranking import Candidate, Ranking, Setting
from lightning_shard.lab.run import Mesh, samples_of, trainer_options
from lightning_shard.lightning import LightningDataModule, LightningModule
from lightning_shard.processes.mesh import Sharding

OTHER_MODES: tuple[Sharding, ...] = ("gradients", "none", "hybrid")
TRIED_IN_ALL_MODES = 3  # so many of the fastest meshes
MOST_TILES = 64
FOR_MESHES = 0.8  # a share of the time; the rest is for modes


def best(
    module: LightningModule,
    data: Data,
    cluster: Cluster | str,
    shard_dims: ShardDims = None,
    *,
    seconds: float = 33.0,
    measure: bool = False,
    **trainer: Any,
) -> Ranking:
    """Rank meshes, sharding modes, and what is kept of activations, by samples a second.

    Each mesh is predicted with parameters sharded over all ranks, and with all activations kept.
    Where that does not fit, activations are computed again, or offloaded; on one device, tiles take
    turns, too (`TiledStrategy`). A setting is not
    predicted whose share of the activations of a smaller domain is already too large, nor a split
    along several dims where as many ranks along one dim would be slower than another mesh if they
    exchanged nothing. The fastest meshes are predicted with the other sharding modes.

    Args:
        module: An ordinary LightningModule, which stays as it is.
        data: A data module, or a DataLoader of training batches: those of one data replica.
        cluster: The machines on which it is to run, such as "8x8xH100".
        shard_dims: The dims that may be split; see `HybridShardStrategy`.
        seconds: The time after which no further mesh is tried.
        measure: If true, this machine runs the kernels, as for `plan`; that takes time of its own.
        trainer: Arguments of the Trainer, such as `precision="bf16-mixed"`.

    Example:
        >>> print(lightning_shard.best(module, data, "8x8xH100"))
    """
    kernels = own_kernels(cluster) if measure else None
    cluster = read_cluster(cluster) if isinstance(cluster, str) else cluster
    cluster = cluster if kernels is None else kernels.cluster
    batch = first_batches(module, data, "fit")[0]
    extents = extents_of(batch, shard_dims)
    options = {"shard_dims": shard_dims}
    options |= {} if kernels is None else {"kernels": kernels}
    options |= trainer_options(best, trainer)
    search = _Search(module, data, cluster, options)
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
    is_kept = any(each.fits and each.setting == Setting((1, 1)) for each in search.tried)
    if cluster.devices == 1 and not is_kept:
        search.try_tiles(max(extents[:1], default=0), is_late)
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
    except TypeError:  # a stream has no length
        return 0


def _in_order(all_meshes: list[Mesh]) -> tuple[list[Mesh], list[Mesh]]:
    """Return splits along one dim, the smallest and the largest domain first, and the others."""
    lines = [mesh for mesh in all_meshes if len(mesh) == 2]
    return [*lines[:1], *lines[:0:-1][:1], *lines[1:-1]], [m for m in all_meshes if len(m) > 2]


def _in_other_modes(fastest: Iterable[Candidate], cluster: Cluster) -> list[Setting]:
    modes = OTHER_MODES if cluster.nodes > 1 else OTHER_MODES[:-1]  # hybrid: copies in each node
    first = [each.setting for each in fastest][:TRIED_IN_ALL_MODES]
    return [replace(setting, sharding=mode) for setting in first for mode in modes]


@dataclass
class _Search:
    """Predicts settings, and remembers the results.

    Attributes:
        module: The module.
        data: The data of one data replica.
        cluster: The machines.
        options: Further arguments of `predict`.
        tried: The settings that were predicted.
        refused: The reason for which a mesh cannot train the module, by mesh.
    """

    module: LightningModule
    data: Data
    cluster: Cluster
    options: Mapping[str, Any]
    tried: list[Candidate] = field(default_factory=list[Candidate])
    refused: dict[Mesh, str] = field(default_factory=dict[Mesh, str])

    @property
    def fitting(self) -> list[Candidate]:
        """The settings that fit, the fastest first."""
        return sorted((each for each in self.tried if each.fits), key=lambda c: -c.rate)

    def try_kept(self, mesh: Mesh) -> None:
        """Predict a mesh with all activations kept, unless that cannot fit."""
        if self._may_fit(Setting(mesh)):
            self.try_setting(Setting(mesh))

    def save_memory(self, mesh: Mesh) -> None:
        """Predict settings of less memory for a mesh that does not fit with activations kept."""
        kept = Setting(mesh)
        if any(each.setting == kept and each.fits for each in self.tried):
            return
        ways = [
            replace(kept, activation_checkpointing=True),
            replace(kept, activation_offload=True),
        ]
        for way in filter(self._may_fit, ways):
            self.try_setting(way)

    def try_tiles(self, rows: int, is_late: Callable[[], bool]) -> None:
        """Predict the least number of tiles of a field of so many rows that fits the device."""

        def needs(tiles: int) -> float:
            setting = Setting((1, tiles), in_turns=True)
            if not is_late():
                self.try_setting(setting)
            found = (each.forecast.memory for each in self.tried if each.setting == setting)
            return next(found, math.inf)

        if rows > 1:
            fewest(needs, self.cluster.device.memory, first=2, most=min(rows, MOST_TILES))

    def try_setting(self, setting: Setting) -> None:
        """Predict a setting, unless its mesh cannot train the module."""
        if setting.mesh in self.refused:
            return
        try:
            tiles = {"tiles": setting.mesh[1:]} if setting.in_turns else {}
            mesh = (1, 1) if setting.in_turns else setting.mesh
            forecast = predict(
                self.module, self.data, mesh, self.cluster, sharding=setting.sharding,
                activation_checkpointing=setting.activation_checkpointing,
                activation_offload=setting.activation_offload, **tiles, **self.options,
            )  # fmt: skip
        except (UnsupportedOperationError, ValueError) as error:
            self.refused[setting.mesh] = str(error)
        else:
            self.tried.append(Candidate(setting, forecast, self.cluster.device.memory))

    def cannot_win(self, mesh: Mesh) -> bool:
        """Return whether as many ranks along fewer dims would lose if they exchanged nothing."""
        wins = max((each.rate for each in self.tried if each.fits), default=0.0)
        as_many = [
            each.forecast for each in self.tried
            if each.setting.ranks == math.prod(mesh[1:]) and len(each.setting.mesh) < len(mesh)
            and each.fits
        ]  # fmt: skip
        loses = [one.samples <= wins * (one.seconds - one.exchange) for one in as_many]
        return bool(loses) and all(loses)

    def _may_fit(self, setting: Setting) -> bool:
        """Return whether its share of what a smaller domain held could fit."""
        too_large = [
            each for each in self.tried
            if replace(each.setting, mesh=setting.mesh) == setting and not each.fits
        ]  # fmt: skip
        return all(_share(each, setting.ranks) <= each.memory_of_device for each in too_large)


def _share(candidate: Candidate, ranks: int) -> float:
    rest = candidate.forecast.memory - candidate.states
    return candidate.states + rest * candidate.setting.ranks / ranks


def meshes(devices: int, extents: Sequence[int]) -> list[Mesh]:
    """Return all meshes of so many devices, those of small domains first.

    If domains differ only in the order of equal extents, the one is listed that splits the first
    dims more: its slabs lie together in memory. No dim is split into more parts than it has rows.

    Args:
        devices: The number of data replicas x domain ranks.
        extents: The extents of the dims that may be split.
    """
    found: list[Mesh] = []
    for ranks in range(1, devices + 1):
        if devices % ranks == 0:
            domains = [d for d in _domains(ranks, tuple(extents)) if _is_first(d, extents)]
            found += [(devices // ranks, *domain) for domain in sorted(domains, key=max)]
    return found


def _domains(ranks: int, extents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield ranks along the first dims, at least two along each but for one rank alone."""
    if ranks == 1:
        yield (1,)
        return
    if not extents:
        return
    if ranks <= extents[0]:
        yield (ranks,)
    for first in range(2, min(ranks // 2, extents[0]) + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _domains(ranks // first, extents[1:]))


def _is_first(domain: tuple[int, ...], extents: Sequence[int]) -> bool:
    sizes = zip(domain, domain[1:], extents, extents[1:], strict=False)
    return all(a >= b or extent != other for a, b, extent, other in sizes)
