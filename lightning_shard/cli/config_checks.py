"""Checks of the resolved configuration against this machine and launcher, before anything is built.

Everything here is known to every rank from its own environment, so all ranks refuse together.
"""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.cli.sources import Sources
from lightning_shard.cli.usage import UsageError, as_usage_error, nearest, nearest_file
from lightning_shard.processes.device import accelerators, device_of, sees_own_device_only
from lightning_shard.processes.process_info import launcher, process_info
from lightning_shard.processes.variables import ProcessInfo
from lightning_shard.trainer.process_mesh import domain_that_is_left, misfit

CKPT_WORDS = ("best", "last", "hpc", "registry")
LEAST = {  # of the Trainer's numbers; Lightning takes smaller ones and fails later, or not at all
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "max_epochs": -1,
    "max_steps": -1,
    "num_nodes": 1,
}


def check(config: Any, given: Sources) -> None:
    """Refuse what cannot run here.

    Args:
        config: The resolved options of one subcommand.
        given: What the user wrote, to name the place.

    Raises:
        UsageError: With one sentence.
    """
    trainer = config.trainer
    _check_names(trainer, given)
    _check_numbers(trainer, given)
    _check_seed(config.get("seed_everything"), given)
    _check_checkpoint(config.get("ckpt_path"), given)
    _check_devices(trainer, given)
    _check_processes(trainer, given)
    _check_mesh(trainer, given)
    _check_contradictions(trainer, given)
    _check_folder(trainer.default_root_dir, given)


def strategy_options(trainer: Any) -> Any:
    """The arguments of the strategy in the resolved options of the trainer."""
    strategy = trainer.strategy
    return {} if isinstance(strategy, str) else strategy.get("init_args") or {}


def _check_names(trainer: Any, given: Sources) -> None:
    for option, names in (
        ("strategy", StrategyRegistry.available_strategies()),
        ("accelerator", [*AcceleratorRegistry.available_accelerators(), "gpu"]),
    ):
        value = trainer[option]
        if isinstance(value, str) and value not in {"auto", *names}:
            kind = nearest(value, ["auto", *names], "use one of")
            kind = kind or nearest(value, ["auto", *_families(names)], "use one of")
            if option == "strategy" and value.endswith("Strategy"):
                kind = f"; to name a class write trainer.strategy.class_path: {value}"
            raise UsageError(f"unknown {option} '{value}'{_at(given, f'trainer.{option}')}{kind}")


def _check_numbers(trainer: Any, given: Sources) -> None:
    for option, least in LEAST.items():
        _require_least(least, trainer.get(option), f"trainer.{option}", given)
    for option, sizes in zip(("domain", "data"), _sizes(trainer), strict=True):
        _require_least(1, sizes, f"trainer.strategy.{option}_parallel_size", given)


def _require_least(least: int, value: Any, key: str, given: Sources) -> None:
    """Refuse a number, or numbers of a list, that are too small; words and null are no numbers."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(number, int | float) and number < least for number in numbers):
        raise UsageError(f"{key} must be {least} or more; got {_size(value)}{_at(given, key)}")


def _check_seed(seed: Any, given: Sources) -> None:
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        raise UsageError(
            f"seed_everything must be from 0 to {2**32 - 1}; got {seed}"
            f"{_at(given, 'seed_everything')}"
        )


def _families(names: list[str]) -> list[str]:
    """Names without their variants, such as `ddp_spawn` beside `ddp`."""
    return [n for n in names if not any(n != m and n.startswith(m + "_") for m in names)]


def _check_folder(folder: Any, given: Sources) -> None:
    if not isinstance(folder, str) or "://" in folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as err:
        place = _at(given, "trainer.default_root_dir")
        raise UsageError(
            f"trainer.default_root_dir '{folder}'{place} cannot be made: {err.strerror}"
        ) from err


def _check_checkpoint(path: Any, given: Sources) -> None:
    if (
        not isinstance(path, str)
        or path in CKPT_WORDS
        or "://" in path
        or path.startswith("registry:")
    ):
        return
    file = Path(path)
    if not file.exists():
        place = _at(given, "ckpt_path")
        raise UsageError(f"ckpt_path '{path}'{place} does not exist{nearest_file(file)}")


def _check_devices(trainer: Any, given: Sources) -> None:
    words = trainer.devices
    if isinstance(words, str) and not re.fullmatch(r"auto|-1|[\d, ]*\d[\d, ]*", words):
        raise UsageError(
            f"trainer.devices must be a number, auto, or a list such as 0,1; got '{words}'"
            f"{_at(given, 'trainer.devices')}"
        )
    wanted = _count(words)
    _require_least(1, wanted, "trainer.devices", given)
    kind = _device_kind(trainer.accelerator)
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


def _check_processes(trainer: Any, given: Sources) -> None:
    devices, started = _count(trainer.devices), _started()
    if devices is None or started is None or "trainer.devices" not in given:
        return
    if devices == 1 and _sees_own_device(trainer, started):
        devices = started.local_world_size
    nodes = trainer.num_nodes
    if _sizes(trainer)[0] == "auto":  # the nodes that an elastic launcher has are enough
        nodes = max(1, started.world_size // devices)
    asked = devices * nodes
    if asked != started.world_size:
        per_node, rest = started.local_world_size, started.world_size % started.local_world_size
        fix = f"devices {per_node} and num_nodes {started.world_size // per_node}"
        by = launcher().title
        raise UsageError(
            f"trainer.devices asks for {_plural(asked)} (devices {devices} x num_nodes "
            f"{trainer.num_nodes}){_at(given, 'trainer.devices')} but {by} started "
            f"{started.world_size}; use {'devices auto' if rest else fix}, or start {asked} with "
            f"{by}"
        )


def _sees_own_device(trainer: Any, started: ProcessInfo) -> bool:
    """Return whether each process of this node sees one device only, its own."""
    kind = _device_kind(trainer.accelerator, guess=True)
    return kind is not None and sees_own_device_only(kind, started.local_world_size)


def _sizes(trainer: Any) -> tuple[Any, Any]:
    """domain_parallel_size and data_parallel_size; None where the strategy is not ours."""
    named = "" if isinstance(trainer.strategy, str) else str(trainer.strategy.get("class_path"))
    if not named.endswith("HybridShardStrategy"):
        return None, None
    sizes = strategy_options(trainer)
    return sizes.get("domain_parallel_size", 1), sizes.get("data_parallel_size", "auto")


def _check_mesh(trainer: Any, given: Sources) -> None:
    domain, data = _sizes(trainer)
    if domain is None:
        return
    world, reason = _world(trainer)
    if world is None:
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


def _check_contradictions(trainer: Any, given: Sources) -> None:
    """Refuse options that Lightning or the strategy would take and not obey."""
    clip = trainer.get("gradient_clip_val")
    if isinstance(clip, int | float) and clip < 0:
        raise UsageError(
            f"trainer.gradient_clip_val is {clip}{_at(given, 'trainer.gradient_clip_val')}, but a "
            "norm cannot be negative; use a number from 0 on, or null"
        )
    options = strategy_options(trainer)
    nested = options.get("sharding", "full")
    nested = {"mode": nested} if isinstance(nested, str) else nested
    if nested.get("mode") == "none" and nested.get("cpu_offload"):
        key = "trainer.strategy.sharding"
        raise UsageError(
            f"{key} is none{_at(given, key)}, but cpu_offload needs shards to move; use sharding "
            "full, or leave out cpu_offload"
        )


def _world(trainer: Any) -> tuple[int | None, str]:
    if started := _started():
        return started.world_size, f"{launcher().world_size or 'processes'} {started.world_size}"
    devices = _count(trainer.devices)
    if devices is None and trainer.devices == "auto":
        kind = _device_kind(trainer.accelerator, guess=True)
        if kind is None and trainer.accelerator != "cpu" and trainer.accelerator != "auto":
            return None, ""
        devices = device_of(kind or "cpu").module.device_count()
    if devices is None:
        return None, ""
    return devices * trainer.num_nodes, f"devices {devices} x num_nodes {trainer.num_nodes}"


def _device_kind(accelerator: Any, guess: bool = False) -> str | None:
    """The type of the devices asked for; None for the CPU, Apple's GPU, and what is not known."""
    rows = accelerators()
    if accelerator in [row.type for row in rows]:
        return accelerator
    found = next(row for row in rows if row.found_by_lightning)
    if accelerator == "gpu":
        return None if torch.backends.mps.is_available() else found.type
    return found.type if accelerator == "auto" and guess and found.module.is_available() else None


def _count(devices: Any) -> int | None:
    """Number of devices asked for on one node; None if Lightning chooses."""
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return devices if isinstance(devices, int) and devices >= 0 else None


def _started() -> ProcessInfo | None:
    """This process among those that a launcher has started; None where the Trainer starts them."""
    with as_usage_error(ValueError):
        return process_info() if launcher().starts_all else None


def _at(given: Sources, key: str) -> str:
    place = given.place(key)
    return f" ({place})" if place else ""


def _plural(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _size(size: Any) -> str:
    return " x ".join(str(n) for n in size) if isinstance(size, (list, tuple)) else str(size)
