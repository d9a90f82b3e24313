"""Checks the options of tiles (`--tiles` and its like), and of what predictions go into."""

import inspect
from collections.abc import Callable, Mapping
from pydoc import locate
from typing import Any

from jsonargparse import Namespace

from lightning_shard.cli.config_checks import sizes_of, strategy_options
from lightning_shard.cli.usage import UsageError, as_usage_error
from lightning_shard.data.field_sink import FieldSink
from lightning_shard.lab.tiled_strategy import TiledStrategy
from lightning_shard.memory.in_tiles import sizes_of_tiles
from lightning_shard.memory.sizes import bytes_of
from lightning_shard.processes.process_info import launcher
from lightning_shard.trainer.asked_devices import count_of
from lightning_shard.trainer.strategy import HybridShardStrategy

TYPES: dict[str, Any] = {
    "tiles": int | list[int] | str | None, "tile_memory": str | None, "tile_budget": str | None
}  # fmt: skip
_KINDS = (HybridShardStrategy, TiledStrategy)  # their options are those of tiles
_OURS = {kind.strategy_name: f"lightning_shard.{kind.__name__}" for kind in _KINDS}


def check_tiles(command: str, config: Any) -> None:
    """Check the options, and let a Trainer that may choose its devices have one.

    Args:
        command: The command of Lightning.
        config: Its resolved options, whose devices and strategy are changed in place.

    Raises:
        UsageError: With one sentence.
    """
    if config.tiles is None:
        for name in ("tile_memory", "tile_budget"):
            if config[name] is not None:
                raise UsageError(f"--{name} needs --tiles, such as --tiles 8")
        return
    with as_usage_error(ValueError):
        config.tiles = "auto" if config.tiles == "auto" else [*sizes_of_tiles(config.tiles)]
        if config.tile_budget is not None:
            bytes_of(config.tile_budget, "tile_budget")
    trainer, (domain, data) = config.trainer, sizes_of(config.trainer)
    if domain not in (None, 1, "auto"):
        raise UsageError(
            f"tiles are the parts of a field, but trainer.strategy.domain_parallel_size is {domain}"
            ", which splits it over devices; make it 1"
        )
    if command == "predict":
        _check_one_device(trainer, data)
    else:
        _check_strategy(trainer)
    if count_of(trainer.devices) is None and not launcher().starts_all:
        trainer.devices = 1
    if isinstance(trainer.strategy, str) and trainer.strategy in ("auto", *_OURS):
        named = _OURS.get(trainer.strategy, _OURS[TiledStrategy.strategy_name])
        trainer.strategy = Namespace(class_path=named)
    dims = strategy_options(trainer).get("shard_dims")
    if command == "predict" and isinstance(dims, Mapping):
        raise UsageError(
            "--tiles splits the same dims of all entries of a batch, but shard_dims names entries; "
            "give numbers of dims, such as 2"
        )


def check_output(config: Any) -> None:
    """Check where predictions go, and let none pile up in memory, in place.

    Raises:
        UsageError: With one sentence.
    """
    if config.return_predictions is None:
        config.return_predictions = False
    if config.output is not None:
        with as_usage_error(ValueError, FileExistsError, NotADirectoryError, ModuleNotFoundError):
            FieldSink(config.output)


def _check_one_device(trainer: Any, data: Any) -> None:
    """Refuse replicas, of which each would predict other samples."""
    for name, count in (
        ("devices", count_of(trainer.devices)), ("num_nodes", trainer.num_nodes),
        ("strategy.data_parallel_size", data),
    ):  # fmt: skip
        if count not in (None, 1, "auto"):
            raise UsageError(
                f"predict computes in tiles on one device, but trainer.{name} is {count}; make it 1"
            )


def _check_strategy(trainer: Any) -> None:
    """Refuse a strategy other than those of this package."""
    given = trainer.strategy
    path = given if isinstance(given, str) else given.class_path
    if path not in ("auto", *_OURS) and locate(path) not in _KINDS:
        raise UsageError(
            f"--tiles trains by TiledStrategy, but trainer.strategy is {path}; leave it out"
        )


def builder(command: str, config: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `build` that makes the strategy which the options ask for.

    The configuration keeps the class that the user named, so that the one that is saved serves
    other devices as well, and predictions.
    """

    def built(kind: type, *args: Any, **options: Any) -> Any:
        if config.get("tiles") is None or kind not in _KINDS:
            return build(kind, *args, **options)
        options = {name: x for name, x in options.items() if name not in TYPES}
        if command == "predict":
            known = inspect.signature(HybridShardStrategy).parameters
            options = {name: x for name, x in options.items() if name in known}
            return build(HybridShardStrategy, *args, **options)
        where = {name: config[name] for name in TYPES}
        return build(TiledStrategy, *args, **where, **options)

    return built
