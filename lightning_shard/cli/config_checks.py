"""Checks of the resolved configuration against this machine and launcher, before anything is built.

Everything here is known to every rank from its own environment, so all ranks refuse together.
"""

import os
import re
from pathlib import Path
from typing import Any

from lightning_shard.cli.positions import Given
from lightning_shard.cli.usage import UsageError, as_usage_error, nearest_file
from lightning_shard.trainer.asked_devices import count_of, names_all

CKPT_WORDS = ("best", "last", "hpc", "registry")
LEAST = {  # Lightning takes smaller numbers and fails later, or not at all
    "seed_everything": 0, "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1, "trainer.gradient_clip_val": 0,
    "trainer.max_epochs": -1, "trainer.max_steps": -1, "trainer.num_nodes": 1,
    "trainer.strategy.domain_parallel_size": 1, "trainer.strategy.data_parallel_size": 1,
    "trainer.devices": 1,
}  # fmt: skip


def check_numbers(config: Any, given: Given) -> None:
    """Refuse numbers that are too small, and devices that are none.

    Args:
        config: The resolved options of one subcommand.
        given: The options that the user wrote, to name the place.

    Raises:
        UsageError: With one sentence.
    """
    for key in ("trainer", "trainer.strategy"):
        if config.get(key, 0) is None:  # as where all lines below it are comments
            raise UsageError(
                f"{key}{_at(given, key)} has no options; write one below it, or leave it out"
            )
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
    """Refuse files and variables of a launcher that do not fit, as `check_numbers` does."""
    trainer = config.trainer
    with as_usage_error(ValueError):
        if names_all(trainer.accelerator, trainer.devices):
            trainer.devices = 1  # Lightning counts those that this process sees
    path, folder = map(in_own_home, (config.get("ckpt_path"), config.trainer.default_root_dir))
    if path == "best":  # Lightning means the training before in the same program
        raise UsageError(
            f"ckpt_path 'best'{_at(given, 'ckpt_path')} is of a training in the same program, and "
            "a command begins without one; give the file that fit names after 'Best checkpoint:'"
        )
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


def in_own_home(path: Any) -> Any:
    """Read a path that begins with `~`, as Lightning does."""
    # pathlib raises for a user without a home, and changes URLs
    return os.path.expanduser(path) if isinstance(path, str) else path  # noqa: PTH111


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


def _at(given: Given, key: str) -> str:
    place = given.place(key)
    return f" ({place})" if place else ""
