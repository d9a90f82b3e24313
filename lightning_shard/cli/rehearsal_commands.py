"""`python -m lightning_shard check|plan|certify --config a.yaml`: training, rehearsed here.

`check` trains one step in one process and on two ranks that share each sample, compares them, and
names the functions that have no rule; it exits with 1 if the module cannot train so. `plan`
predicts what each of the ranks that the config asks for will hold and send; with `--cluster` also
the time of a step there, and with `--best` of the best mesh. `certify` trains some
steps on several meshes, and writes a certificate; it exits with 1 if one differs. All run on the
CPU, take the options of `fit`, and use its model and the first batches of its data.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_shard.cli.certify_words import CertifyWords
from lightning_shard.cli.plan_words import PlanWords
from lightning_shard.cli.sources import Sources
from lightning_shard.cli.usage import UsageError, is_list, told_by_user
from lightning_shard.rehearsal import best_report
from lightning_shard.rehearsal.best import best
from lightning_shard.rehearsal.certify import certify
from lightning_shard.rehearsal.check import check
from lightning_shard.rehearsal.forecast import plan
from lightning_shard.rehearsal.machine import Cluster
from lightning_shard.rehearsal.predict import predict


@dataclass(frozen=True)
class Wanted:
    """What the config asks for.

    Attributes:
        processes: Of all nodes; 0 where it does not say a number.
        domain: Ranks along each split dim.
        shard_dims: Of the strategy.
        trainer: Arguments of the Trainer that change the step.
    """

    processes: int
    domain: tuple[int, ...]
    shard_dims: Any
    trainer: dict[str, Any]


def wanted(given: Sources) -> Wanted:
    """Read what the config asks for before the parser does, which knows this machine alone.

    Raises:
        UsageError: A size is not a whole number.
    """
    sizes = given.value("trainer.strategy.domain_parallel_size", 1)
    nodes = _whole("num_nodes", given.value("trainer.num_nodes", 1))
    devices = given.value("trainer.devices", "auto")
    count = len(devices) if is_list(devices) else devices
    processes = count * nodes if isinstance(count, int) and count > 0 else 0
    if sizes == "auto":
        replicas = given.value("trainer.strategy.data_parallel_size", "auto")
        replicas = 1 if replicas == "auto" else _whole("data_parallel_size", replicas)
        sizes = max(1, processes // replicas) if processes else 2
    each = sizes if is_list(sizes) else [sizes]
    domain = tuple(_whole("domain_parallel_size", size) for size in each)
    return Wanted(processes, domain, None, {})


def _whole(name: str, size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"{name} must be a whole number from 1 on; got {size!r}")
    return size


def on_this_machine(trainer: Any, asked: Wanted) -> Wanted:
    """Let the config run in this process; what it asks for may not be here.

    Args:
        trainer: The resolved options of the trainer, changed in place.
        asked: What was read before.

    Returns:
        The same, with the options that the rehearsed step needs.
    """
    strategy = trainer.strategy
    options: Any = {} if isinstance(strategy, str) else strategy.get("init_args") or {}
    kept = {} if trainer.precision is None else {"precision": trainer.precision}
    trainer.accelerator, trainer.devices, trainer.num_nodes = "cpu", 1, 1
    trainer.logger, trainer.strategy = False, "auto"
    return replace(asked, shard_dims=options.get("shard_dims"), trainer=kept)


def rehearse(
    command: str,
    module: LightningModule,
    data: LightningDataModule | None,
    asked: Wanted,
    keep: Callable[[str], None],
) -> None:
    """Print what was found; `check` exits with 1 if the module cannot train so.

    Args:
        command: "check" or "plan".
        module: What trains.
        data: What it trains on; None if the module has its own loaders.
        asked: What the config asks for.
        keep: Is given what `check` prints.
    """
    source: Any = data or module.train_dataloader()
    ranks = math.prod(asked.domain)
    if command == "plan":
        processes = asked.processes or ranks
        print(plan(module, source, processes, asked.domain, asked.shard_dims, **asked.trainer))
        return
    small = tuple(min(size, 2) for size in asked.domain) if ranks > 1 else (2,)
    found = check(module, source, small, asked.shard_dims, **asked.trainer)
    print(found)
    keep(str(found))
    if not found.is_supported:
        sys.exit(1)


def plan_on(
    cluster: Cluster,
    module: LightningModule,
    data: LightningDataModule | None,
    asked: Wanted,
    words: PlanWords,
    folder: str | None,
) -> None:
    """Print what a step takes on a cluster, of the config's mesh or of the best one.

    Args:
        cluster: Where it is to run.
        module: What trains.
        data: What it trains on; None if the module has its own loaders.
        asked: What the config asks for.
        words: What was typed for `plan`.
        folder: Of the run, for the overlay.
    """
    source: Any = data or module.train_dataloader()
    if words.best:
        found = best(module, source, cluster, asked.shard_dims, **asked.trainer)
        print(best_report.words(found))
        print(
            f"written to {best_report.save(found, words.output or folder or '.')}", file=sys.stderr
        )
        return
    ranks = math.prod(asked.domain)
    if cluster.devices % ranks:
        raise UsageError(
            f"the {cluster.devices} devices must be a multiple of the {ranks} ranks that share a "
            "sample; change --cluster or domain_parallel_size"
        )
    mesh = (cluster.devices // ranks, *asked.domain)
    print(predict(module, source, cluster, mesh, asked.shard_dims, **asked.trainer))


def certify_run(
    module: LightningModule,
    data: LightningDataModule | None,
    asked: Wanted,
    words: CertifyWords,
    resolved: tuple[str, str | None],
) -> None:
    """Print and write the certificate; exit with 1 if a mesh does not train as one process.

    Args:
        module: What trains.
        data: What it trains on; None if the module has its own loaders.
        asked: What the config asks for.
        words: What was typed for `certify`.
        resolved: The text of all options, and the folder of the run.
    """
    source: Any = data or module.train_dataloader()
    digest = hashlib.sha256(resolved[0].encode()).hexdigest()
    with told_by_user(ValueError):
        found = certify(
            module,
            source,
            words.meshes,
            words.steps,
            asked.shard_dims,
            simulated=words.simulated,
            facts={"model": type(module).__name__, "config": f"sha256 {digest[:16]}"},
            **asked.trainer,
        )
    page = found.save(words.output or resolved[1] or ".")
    print(found)
    print(f"written to {page}", file=sys.stderr)
    if not found.is_equal:
        sys.exit(1)
