"""Processes: which launcher has started them, or how the Trainer starts them, and their group."""

import atexit
import itertools
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_utilities.core import rank_zero as utilities_rank_zero
from typing_extensions import override

from lightning_shard.agreement import agree
from lightning_shard.environment import check_processes, environment_of_launcher
from lightning_shard.notebook import NotebookLauncher
from lightning_shard.start import join

# lightning and lightning_utilities have a decorator each, which is told the rank by an attribute
_RANK_ZERO: list[Any] = [fabric_rank_zero.rank_zero_only, utilities_rank_zero.rank_zero_only]

_comparisons = itertools.count()  # the ranks make theirs in the same order


class LauncherStrategy(ParallelStrategy):
    """One process per device, under any launcher."""

    num_nodes = 1
    timeout_s: float
    config: Mapping[str, str] = {}  # of a command line, which ranks have alike
    _environment: ClusterEnvironment | None = None

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    # Lightning assigns its choice, and reads back what it then works with
    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """The launcher's, also of launchers that Lightning does not know."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._environment = environment_of_launcher(environment)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in _RANK_ZERO:
            decorator.rank = self.global_rank

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        check_processes(environment, self.num_processes, self.num_nodes)
        processes = self.num_processes * self.num_nodes
        if environment.creates_processes_externally or processes == 1:
            return
        if _IS_INTERACTIVE and self.num_nodes == 1 and type(environment) is LightningEnvironment:
            self._launcher = NotebookLauncher(self)
        else:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )

    def start(self, device: torch.device, backend: str) -> None:
        """Start the process group, as Lightning does, after the ranks have compared themselves."""
        environment = self.cluster_environment
        assert environment is not None
        if dist.is_initialized():
            return
        address = os.environ["MASTER_ADDR"] = environment.main_address
        port = os.environ["MASTER_PORT"] = str(environment.main_port)
        join(
            self.global_rank,
            self.world_size,
            f"{address}:{port}",
            device=device,
            backend=backend,
            timeout_s=self.timeout_s,
        )
        if "nccl" in backend:  # which warns of groups that were not ended
            atexit.register(_destroy_dist_connection)

    def compare(self, what: str, same: Mapping[str, str]) -> None:
        """Raise on all ranks if they differ in `same`, through the store, which cannot hang.

        Raises:
            ValueError: Two ranks differ.
        """
        if self.world_size > 1:
            agree(
                dist.distributed_c10d._get_default_store(),  # no public way to the store
                f"lightning_shard/{what}_{next(_comparisons)}",
                same,
                rank=self.global_rank,
                world_size=self.world_size,
                remedy="start all ranks with the same code, options and files",
                timeout_s=self.timeout_s,
            )
