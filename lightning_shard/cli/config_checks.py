"""Checks of the resolved configuration against this machine and launcher, before anything is built.

Everything here is known to every rank from its own environment, so all ranks refuse together.
"""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.cli.positions import Given
from lightning_shard.cli.usage import UsageError, as_usage_error, nearest_file
from lightning_shard.processes.device import accelerators, device_of, sees_own_device_only
from lightning_shard.processes.nearest import nearest
from lightning_shard.processes.process_info import launcher, process_info
from lightning_shard.processes.variables import ProcessInfo
from lightning_shard.trainer.process_mesh import domain_that_is_left, misfit

CKPT_WORDS = ("best", "last", "hpc", "registry")
LEAST = {  # Lightning takes smaller numbers and fails later, or not at all
    "seed_everything": 0, "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1, "trainer.gradient_clip_val": 0,
    "trainer.max_epochs": -1, "trainer.max_steps": -1, "trainer.num_nodes": 1,
    "trainer.strategy.domain_parallel_size": 1, "trainer.strategy.data_parallel_size": 1,
    "trainer.devices": 1,
}  # fmt: skip


def find_device(trainer: Any) -> None:
    """Let "auto" and "gpu" mean this machine's device where Lightning would not find it.

    Args:
        trainer: The resolved options of the trainer, changed in place.
    """
    there = [row for row in accelerators() if row.module.is_available()]
    if trainer.accelerator in ("auto", "gpu") and not all(row.found_by_lightning for row in there):
        trainer.accelerator = there[0].type


def check_numbers(config: Any, given: Given) -> None:
    """Refuse numbers that are too small, and devices that are none.

    Args:
        config: The resolved options of one subcommand.
        given: The options that the user wrote, to name the place.

    Raises:
        UsageError: With one sentence.
    """
    words = config.trainer.devices
    if isinstance(words, str) and not re.fullmatch(r"auto|-1|[\d, ]*\d[\d, ]*", words):
        raise UsageError(
            f"trainer.devices must be a number, auto, or a list such as 0,1; got '{words}'"
            f"{_at(given, 'trainer.devices')}"
        )
    sizes = (*sizes_of(config.trainer), count_of(words))
    values = (*(config.get(key) for key in [*LEAST][:-3]), *sizes)
    for (key, least), value in zip(LEAST.items(), values, strict=True):
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(n, int | float) and n < least for n in numbers):
            raise UsageError(f"{key} must be {least} or more; got {value}{_at(given, key)}")


def check(config: Any, given: Given) -> None:
    """Refuse devices, names, files and meshes that cannot run here, as `check_numbers` does."""
    trainer = config.trainer
    _check_names(trainer, given)
    _check_devices(trainer, given)
    _check_processes(trainer, given)
    _check_mesh(trainer, given)
    _check_files(config, given)
    options, key = strategy_options(trainer), "trainer.strategy.sharding"
    sharding = options.get("sharding", "full")
    nested = {"mode": sharding} if isinstance(sharding, str) else sharding
    if nested.get("mode") == "none" and nested.get("cpu_offload"):
        raise UsageError(
            f"{key} is none{_at(given, key)}, but cpu_offload needs shards to move; use sharding "
            "full, or leave out cpu_offload"
        )


def strategy_options(trainer: Any) -> Any:
    """Return the arguments of the strategy in the resolved options of the trainer."""
    strategy = trainer.strategy
    return {} if isinstance(strategy, str) else strategy.get("init_args") or {}


def sizes_of(trainer: Any) -> tuple[Any, Any]:
    """Return domain_parallel_size and data_parallel_size; None for a strategy of others."""
    named = "" if isinstance(trainer.strategy, str) else str(trainer.strategy.get("class_path"))
    if not named.endswith("HybridShardStrategy"):
        return None, None
    sizes = strategy_options(trainer)
    return sizes.get("domain_parallel_size", 1), sizes.get("data_parallel_size", "auto")


def count_of(devices: Any) -> int | None:
    """Count the devices that the option asks for on one node; None if Lightning chooses."""
    if isinstance(devices, str) and not devices.isdigit():
        numbers = [part for part in devices.split(",") if part.strip()]
        return len(numbers) if "," in devices else None
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return int(devices) if int(devices) >= 0 else None


def _check_names(trainer: Any, given: Given) -> None:
    for option, names in (
        ("strategy", StrategyRegistry.available_strategies()),
        ("accelerator", [*AcceleratorRegistry.available_accelerators(), "gpu"]),
    ):
        value = trainer[option]
        if isinstance(value, str) and value not in {"auto", *names}:
            close = nearest(value, ["auto", *names], "") or f"; use one of auto, {', '.join(names)}"
            if option == "strategy" and value.endswith("Strategy"):
                close = f"; to name a class write trainer.strategy.class_path: {value}"
            raise UsageError(f"unknown {option} '{value}'{_at(given, f'trainer.{option}')}{close}")


def _check_files(config: Any, given: Given) -> None:
    path, folder = config.get("ckpt_path"), config.trainer.default_root_dir
    is_file = isinstance(path, str) and path not in CKPT_WORDS and ":" not in path
    if is_file and not Path(path).exists():
        close = nearest_file(Path(path))
        raise UsageError(f"ckpt_path '{path}'{_at(given, 'ckpt_path')} does not exist{close}")
    if isinstance(folder, str) and "://" not in folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as err:
            key, why = "trainer.default_root_dir", f"cannot be made: {err.strerror}"
            raise UsageError(f"{key} '{folder}'{_at(given, key)} {why}") from err


def _check_devices(trainer: Any, given: Given) -> None:
    kind, wanted = _device_kind(trainer.accelerator), count_of(trainer.devices)
    if kind is None:
        return
    available = device_of(kind).count()
    if not available:
        raise UsageError(
            f"trainer.accelerator is '{trainer.accelerator}'{_at(given, 'trainer.accelerator')} "
            f"but this machine has no {kind} device; use cpu or auto"
        )
    started = _started()
    if started and wanted == started.local_world_size and _sees_own_device(trainer, started):
        trainer.devices = 1  # Lightning counts those that this process sees
        return
    if wanted is not None and wanted > available:
        raise UsageError(
            f"trainer.devices asks for {wanted} {kind} devices{_at(given, 'trainer.devices')} "
            f"but {available} are visible; use at most {available}"
        )


def _check_processes(trainer: Any, given: Given) -> None:
    devices, started, key = count_of(trainer.devices), _started(), "trainer.devices"
    if devices is None or started is None or key not in given:
        return
    world, local = started.world_size, started.local_world_size
    if devices == 1 and _sees_own_device(trainer, started):
        devices = local
    # the nodes that an elastic launcher has are enough
    elastic = sizes_of(trainer)[0] == "auto"
    asked = devices * (max(1, world // devices) if elastic else trainer.num_nodes)
    if asked != world:
        fix = "devices auto" if world % local else f"devices {local} and num_nodes {world // local}"
        by = launcher().title
        raise UsageError(
            f"{key} asks for {asked} process{'es' * (asked > 1)} (devices {devices} x num_nodes "
            f"{trainer.num_nodes}){_at(given, key)} but {by} started {world}; use {fix}, or start "
            f"{asked} with {by}"
        )


def _sees_own_device(trainer: Any, started: ProcessInfo) -> bool:
    """Return whether each process of this node sees one device only, its own."""
    kind = _device_kind(trainer.accelerator, guess=True)
    return kind is not None and sees_own_device_only(kind, started.local_world_size)


def _check_mesh(trainer: Any, given: Given) -> None:
    domain, data = sizes_of(trainer)
    world, reason = _world(trainer)
    if domain is None or world is None:
        return
    if domain == "auto":
        domain = domain_that_is_left(world, data)
    sizes = tuple(domain) if isinstance(domain, list | tuple) else (domain,)
    if found := misfit(world, sizes, data):
        key = f"trainer.strategy.{found.option}"
        more = ", or more devices" if world == 1 and key.endswith("domain_parallel_size") else ""
        raise UsageError(
            f"{key} {found.size}{_at(given, key)}{found.problem} ({reason}); {found.remedy}{more}"
        )


def _world(trainer: Any) -> tuple[int | None, str]:
    if started := _started():
        return started.world_size, f"{launcher().world_size or 'processes'} {started.world_size}"
    devices = count_of(trainer.devices)
    if devices is None and trainer.devices == "auto":
        kind = _device_kind(trainer.accelerator, guess=True)
        if kind is None and trainer.accelerator not in ("cpu", "auto"):
            return None, ""
        devices = device_of(kind or "cpu").module.device_count()
    if devices is None:
        return None, ""
    return devices * trainer.num_nodes, f"devices {devices} x num_nodes {trainer.num_nodes}"


def _device_kind(accelerator: Any, guess: bool = False) -> str | None:
    """Return the type of the devices asked for; None for the CPU, Apple's GPU and other names."""
    rows = accelerators()
    if accelerator in [row.type for row in rows]:
        return accelerator
    found = next(row for row in rows if row.found_by_lightning)
    if accelerator == "gpu":
        return None if torch.backends.mps.is_available() else found.type
    return found.type if accelerator == "auto" and guess and found.module.is_available() else None


def _started() -> ProcessInfo | None:
    """Describe this process among those of a launcher; None where the Trainer starts them."""
    with as_usage_error(ValueError):
        return process_info() if launcher().starts_all else None


def _at(given: Given, key: str) -> str:
    place = given.place(key)
    return f" ({place})" if place else ""
