"""Lets a Trainer predict in tiles on its one device, of batches that stay in the host's memory."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_shard.data.split import ShardDims
from lightning_shard.lab.least_tiles import LeastTiles, least_tiles
from lightning_shard.lightning import LightningDataModule, LightningModule, Trainer, is_overridden
from lightning_shard.memory.in_tiles import in_tiles

_TRANSFER = "transfer_batch_to_device"  # the hook of Lightning


@contextmanager
def predicting(
    trainer: Trainer,
    model: LightningModule,
    data: LightningDataModule | None,
    tiles: int | str | Sequence[int],
    shard_dims: ShardDims,
    *,
    tile_memory: str | None,
    tile_budget: str | None,
    gather: bool,
) -> Generator[LeastTiles | None]:
    """Let `predict_step` compute in tiles, while open.

    Args:
        trainer: The Trainer that predicts.
        model: Its module.
        data: Its data module; None where the module has loaders.
        tiles: The number of tiles, along each split dim; "auto": the least that fits.
        shard_dims: The dims that are split.
        tile_memory: A directory in whose files waiting tiles lie.
        tile_budget: Bytes that tiles may have on the device.
        gather: False leaves predictions in tiles, for a `PredictionWriter`.

    Yields:
        The least number of tiles, if it was looked for.
    """
    device, found = trainer.strategy.root_device, None
    strategy: Any = trainer.strategy
    strategy.reads_by_tiles = True
    if data is not None:
        data.trainer = trainer  # its datasets ask for it as the least number of tiles is looked for
    if tiles == "auto":
        found = least_tiles(
            model, data, device, tile_memory, tile_budget, stage="predict", keeps_parameters=True,
            shard_dims=shard_dims, sharding="none", precision=trainer.precision,
        )  # fmt: skip
        tiles = found.tiles
    where: dict[str, Any] = {"device": device, "tile_memory": tile_memory}
    where |= {"tile_budget": tile_budget, "gather": gather}
    with in_tiles(model, tiles, shard_dims, methods=("predict_step",), **where):
        holder: Any = model if data is None or is_overridden(_TRANSFER, model) else data
        setattr(holder, _TRANSFER, lambda batch, *_: batch)
        try:
            yield found
        finally:
            delattr(holder, _TRANSFER)
            strategy.reads_by_tiles = False
