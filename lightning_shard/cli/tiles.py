"""Reads `--tiles` and `--tile_memory`, with which one device computes a field in tiles."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_shard.cli.config_checks import count_of, sizes_of, strategy_options
from lightning_shard.cli.usage import UsageError, as_usage_error
from lightning_shard.lab.tiles import in_tiles, sizes_of_tiles

OPTIONS: dict[str, tuple[Any, str]] = {
    "tiles": (
        int | list[int] | None,
        "Predict on one device in so many tiles, one after the other: 8, or [2,4] for two dims.",
    ),
    "tile_memory": (
        str | None,
        "A directory in whose files waiting tiles lie, instead of the host's memory.",
    ),
}
_TRANSFER = "transfer_batch_to_device"  # the hook of Lightning
SERVED = ("predict",)  # the commands that compute in tiles


def add_tiles(parser: Any) -> None:
    """Add the options to the parser of a command of Lightning."""
    for name, (kind, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, default=None, help=text)


def check_tiles(command: str, config: Any) -> None:
    """Check the options, and let a Trainer that may choose its devices have one.

    Args:
        command: The command of Lightning.
        config: Its resolved options, whose devices are changed in place.

    Raises:
        UsageError: With one sentence.
    """
    if config.tiles is None:
        if config.tile_memory is not None:
            raise UsageError("--tile_memory needs --tiles, such as --tiles 8")
        return
    if command not in SERVED:
        raise UsageError(f"--tiles serves {', '.join(SERVED)}, not {command}; leave it out")
    with as_usage_error(ValueError):
        sizes_of_tiles(config.tiles)
    trainer, (domain, data) = config.trainer, sizes_of(config.trainer)
    for name, count in (
        ("devices", count_of(trainer.devices)), ("num_nodes", trainer.num_nodes),
        ("strategy.domain_parallel_size", domain), ("strategy.data_parallel_size", data),
    ):  # fmt: skip
        if count not in (None, 1, "auto"):
            raise UsageError(f"tiles share one device, but trainer.{name} is {count}; make it 1")
    if isinstance(strategy_options(trainer).get("shard_dims"), Mapping):
        raise UsageError(
            "--tiles splits the same dims of all entries of a batch, but shard_dims names entries; "
            "give numbers of dims, such as 2"
        )
    trainer.devices = 1


@contextmanager
def predicting(
    model: LightningModule, data: LightningDataModule | None, trainer: Trainer, config: Any
) -> Generator[None]:
    """Let `predict_step` compute in tiles, of batches that stay in the host's memory."""
    dims = strategy_options(config.trainer).get("shard_dims")
    with in_tiles(
        model,
        config.tiles,
        dims,
        methods=("predict_step",),
        device=trainer.strategy.root_device,
        tile_memory=config.tile_memory,
    ):
        holder: Any = model if data is None or is_overridden(_TRANSFER, model) else data
        setattr(holder, _TRANSFER, lambda batch, *_: batch)
        try:
            yield
        finally:
            delattr(holder, _TRANSFER)
