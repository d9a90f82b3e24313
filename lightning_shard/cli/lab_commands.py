"""`python -m lightning_shard check|plan|certify --config a.yaml`: training tried on this machine.

All run on the CPU, take the options of `fit`, and use its model and the first batches of its data.
help.py says what each does.
"""

import argparse
import functools
import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from lightning_shard.cli import lightning_cli
from lightning_shard.cli.config_checks import sizes_of, strategy_options
from lightning_shard.cli.positions import Given
from lightning_shard.cli.run_state import RunState
from lightning_shard.cli.usage import UsageError, as_usage_error, note
from lightning_shard.fsdp.options import ShardingOptions
from lightning_shard.lab.compare import certify, check
from lightning_shard.lab.offload_sizes import offload_sizes
from lightning_shard.lab.own_kernels import device_here
from lightning_shard.lab.predict import plan
from lightning_shard.lab.search import best
from lightning_shard.trainer.asked_devices import count_of
from lightning_shard.trainer.process_mesh import domain_that_is_left


def run(args: Sequence[str], given: Given, own: argparse.Namespace) -> None:
    """Try on this machine what `fit` would train; `own` has the options that `fit` lacks."""
    make = functools.partial(LabCLI, own=own, command=args[0])
    lightning_cli.run(["fit", *args[1:]], given, make)


class LabCLI(lightning_cli.ShardCLI):
    """Build the model and the data of `fit`, and try their training on the CPU of this machine.

    Args:
        args: The words of the command line.
        state: Follows how far the run is.
        own: The options of the command that `fit` lacks.
        command: `check`, `plan` or `certify`.
    """

    def __init__(
        self, args: Sequence[str], state: RunState, own: argparse.Namespace, command: str
    ) -> None:
        self.own, self.command = own, command
        super().__init__(args, state)

    def after_parsing(self, trainer: Any) -> None:
        """Let the config run in this process, whatever machines it asks for."""
        self.processes = (count_of(trainer.devices) or 0) * trainer.num_nodes
        domain, data = sizes_of(trainer)
        if domain == "auto":
            domain = domain_that_is_left(self.processes, data) if self.processes else 2
        self.domain = tuple(domain) if isinstance(domain, list | tuple) else (domain or 1,)
        self.tiles = self.config["fit"].tiles
        if self.tiles is not None:
            self.domain, self.processes = (2,) if self.tiles == "auto" else tuple(self.tiles), 1
        strategy = strategy_options(trainer)
        shard_dims, sharding = strategy.get("shard_dims"), strategy.get("sharding") or "auto"
        with as_usage_error(ValueError):
            how: dict[str, Any] = (
                {"mode": sharding} if isinstance(sharding, str) else vars(sharding)
            )
            self.sharding = ShardingOptions(**how)
        precision = {} if trainer.precision is None else {"precision": trainer.precision}
        self.step: dict[str, Any] = {"shard_dims": shard_dims, **precision}  # these change the step
        trainer.accelerator, trainer.devices, trainer.num_nodes = "cpu", 1, 1
        trainer.logger, trainer.strategy = False, "auto"

    def _run_subcommand(self, subcommand: str) -> None:
        getattr(self, f"_{self.command}")(self.datamodule or self.model.train_dataloader())

    def _plan(self, source: Any) -> None:
        where: dict[str, Any] = {"cluster": self.own.cluster, "measure": self.own.measure}
        if self.own.measure:
            with as_usage_error(ValueError):
                device_here(self.own.cluster)
        if self.own.best:
            found = best(self.model, source, **where, **self.step)
            print(found)
            written = found.save(self.own.output or self.folder or ".")
            print(f"written to {written}", file=sys.stderr)
            return
        where |= {"sharding": self.sharding, **self.step}
        if self.own.offload:
            if self.tiles is not None:
                raise UsageError("tiles move activations already; leave out --tiles or --offload")
            del where["measure"]
            with as_usage_error(ValueError):
                print(offload_sizes(self.model, source, self._mesh(), **where))
            return
        if self.tiles is not None:
            if self.tiles == "auto":
                raise UsageError(
                    "auto asks the device of a run; give plan a number of tiles, such as --tiles 8"
                )
            with as_usage_error(ValueError):
                where["tile_budget"] = self.config["fit"].tile_budget
                print(plan(self.model, source, tiles=self.tiles, **where))
        else:
            print(plan(self.model, source, self._mesh(), **where))

    def _check(self, source: Any) -> None:
        if self.tiles is not None:
            note("check compares ranks with one process; tiles have the rules of ranks")
        alone = math.prod(self.domain) == 1
        domain = (2,) if alone else tuple(min(size, 2) for size in self.domain)
        found = check(self.model, source, (1, *domain), sharding=self.sharding.mode, **self.step)
        print(found)
        if not found.is_supported:
            sys.exit(1)

    def _mesh(self) -> tuple[int, ...]:
        """Return the mesh of the cluster, or of the processes that the config asks for."""
        ranks, cluster = math.prod(self.domain), self.own.cluster
        count = (self.processes or ranks) if cluster is None else cluster.devices
        if count % ranks == 0:
            return (count // ranks, *self.domain)
        typed = cluster is not None
        sentence = (
            f"the {count} {'devices' if typed else 'processes'} must be a multiple of the {ranks} "
            f"ranks that share a sample; change {'--cluster' if typed else 'processes'} or "
            "domain_parallel_size"
        )
        raise UsageError(sentence) if typed else ValueError(sentence)

    def _certify(self, source: Any) -> None:
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        with as_usage_error(ValueError):
            found = certify(
                self.model,
                source,
                self.own.meshes,
                self.own.steps,
                simulated=self.own.simulated,
                sharding=self.sharding.mode,
                facts={"model": type(self.model).__name__, "config": f"sha256 {digest[:16]}"},
                **self.step,
            )
        print(found)
        page = found.save(self.own.output or self.folder or ".")
        print(f"written to {page}", file=sys.stderr)
        if not found.is_equal:
            sys.exit(1)
