"""Trains on a device in tiles: the user's Python runs once, each operation for all tiles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_shard.data.split import shard_batch
from lightning_shard.data.tree import map_leaves
from lightning_shard.lab.batches import Stage
from lightning_shard.lab.least_tiles import LeastTiles, least_tiles
from lightning_shard.lightning import (
    ParallelStrategy,
    StrategyRegistry,
    Trainer,
    TrainerFn,
    is_overridden,
    rank_zero_info,
)
from lightning_shard.memory.in_tiles import (
    refuse_to_offload,
    sizes_of_tiles,
    to_device,
    whole_at,
)
from lightning_shard.memory.paging.device_pager import pager_of
from lightning_shard.memory.sizes import bytes_of
from lightning_shard.tensor.placement import gather
from lightning_shard.tiles.tile_tensor import Tiles
from lightning_shard.trainer.hidden import hidden
from lightning_shard.trainer.host import data_of_stage
from lightning_shard.trainer.on_mesh import register
from lightning_shard.trainer.split_summary import split_summary
from lightning_shard.trainer.strategy import HybridShardStrategy

if TYPE_CHECKING:
    from lightning_shard.memory.paging.pager import Pager

_AFTER_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")  # hooks of a batch
_ADVICE = ".*sync_dist=True.*when logging on epoch level"
_STAGES: dict[TrainerFn, Stage] = {
    TrainerFn.FITTING: "fit",
    TrainerFn.VALIDATING: "validate",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}


class TiledStrategy(HybridShardStrategy):
    """Trains on fields many times larger than a device, exactly, in tiles.

    The Trainer, the module, the callbacks and the optimizers are the user's own, and their Python
    runs once. Fields of a batch are cut into tiles, and each operation runs for all of them, one
    after the other. While one computes, what the others hold lies in the host's memory. Each
    further device is a data replica, which reads samples of its own and computes them in as many
    tiles.
    """

    strategy_name = "tiles"

    def __init__(
        self,
        tiles: int | str | Sequence[int] = 8,
        tile_memory: str | None = None,
        tile_budget: str | None = None,
        **options: Any,
    ) -> None:
        """Describe the tiles.

        Args:
            tiles: The number of tiles along the first spatial dim, or along each split dim, such as
                `[2, 4]`. "auto": the least number along the first dim that fits the device, found
                as the first stage begins.
            tile_memory: A directory in whose files waiting tiles lie, instead of the host's memory.
            tile_budget: Bytes that tiles may have on the device, such as "8GB": only what is above
                travels. By default half of what is free there; on a CPU, and for "0", as
                many as the largest operation of a tile needs.
            options: Further arguments of `HybridShardStrategy`. `exact_random` is True unless it is
                False: random numbers are those of one process.

        Raises:
            ValueError: `tiles` is no number from 1 on, or an argument does not go with tiles.
        """
        sizes = (1,) if tiles == "auto" else sizes_of_tiles(tiles)
        if options.pop("domain_parallel_size", 1) not in (1, "auto"):
            raise ValueError(
                "tiles are the parts of a field, so they do not go with domain_parallel_size; "
                "leave it out, or use HybridShardStrategy, which splits a field over devices."
            )
        if options.get("exact_random") is None:  # as a config says where nobody chose
            options["exact_random"] = True
        super().__init__(domain_parallel_size=1, **options)
        own = {"tiles": tiles, "tile_memory": tile_memory, "tile_budget": tile_budget}
        self._arguments = own | options
        if self.sharding_options.compile_blocks:
            raise ValueError(
                "compile_blocks hides from tiles what is computed inside of a graph, so it cannot "
                "wait in the host's memory; leave it out."
            )
        refuse_to_offload(self.sharding_options.activation_offload)
        self.tiles, self.tile_memory, self.tile_budget = sizes, tile_memory, tile_budget
        self.budget = None if tile_budget is None else bytes_of(tile_budget, "tile_budget")
        pager_of(torch.device("cpu"), folder=tile_memory)  # refuses a folder that is none
        self.chosen: LeastTiles | None = None  # for "auto", once it is known
        self._is_auto = tiles == "auto"
        self._grid: Tiles | None = None
        self._pager: Pager | None = None

    @property
    def is_distributed(self) -> bool:
        """Return whether there are data replicas, so that Lightning injects a sampler."""
        return self.world_size > 1

    @override
    def setup(self, trainer: Trainer) -> None:
        """Choose the number of tiles, if it is "auto", and make them."""
        if self._is_auto and self.chosen is None:
            self._choose_tiles(trainer)
        super().setup(trainer)
        if self.world_size == 1:
            # one process has a group of its own, over which nothing is to be reduced
            self._while_set_up.enter_context(hidden(_ADVICE))
        self._pager = pager_of(self.root_device, self.budget, self.tile_memory)
        self._grid = Tiles(self.tiles, self._pager)

    def _choose_tiles(self, trainer: Trainer) -> None:
        """Find the least number of tiles that fits, on the replica that needs the most.

        Raises:
            ValueError: The memory is not known, or no number is enough.
        """
        options = self.sharding_options
        assert trainer.state.fn is not None
        self.chosen = least_tiles(
            self._module, data_of_stage(trainer), self.root_device, self.tile_memory,
            self.tile_budget, stage=_STAGES[trainer.state.fn], shard_dims=self.shard_dims,
            sharding=options.mode, precision=trainer.precision,
            activation_checkpointing=options.activation_checkpointing,
        )  # fmt: skip
        most = self.peers.reduce(
            torch.tensor(float(self.chosen.tiles), device="cpu"), self.root_device, group=None,
            reduce_op="max", copies=1,
        )  # fmt: skip
        self.tiles = (int(most),)
        rank_zero_info(str(self.chosen))

    def _options_alike(self) -> dict[str, str]:
        tiles = "auto" if self._is_auto else "x".join(map(str, self.tiles))
        return {"the number of tiles": tiles} | super()._options_alike()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Cut a batch on the host, and move it tile by tile.

        Where hooks look at a batch on the device, it is moved there as a whole.
        """
        assert self._grid is not None
        trainer = self._module.trainer
        owners = self._module, getattr(trainer, "datamodule", None)
        sees = any(is_overridden(name, owner) for name in _AFTER_TRANSFER for owner in owners)
        first = self.root_device if sees else torch.device("cpu")
        whole = ParallelStrategy.batch_to_device(self, batch, first, dataloader_idx)
        batch = shard_batch(whole, self._grid, self.shard_dims)
        self.announced.say(split_summary(batch), trainer.state.fn, self._grid.count)
        return map_leaves(lambda leaf: to_device(leaf, self.root_device), batch)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return whole predictions, in the host's memory where they would fill a device."""
        result = super().predict_step(*args, **kwargs)
        return map_leaves(lambda leaf: whole_at(leaf, torch.device("cpu")), result)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add to an error of memory that more tiles need less."""
        super().on_exception(exception)
        if isinstance(exception, torch.OutOfMemoryError):
            more = [2 * size for size in self.tiles]
            exception.add_note(
                "The device has no room for the tensors of one operator of one tile beside the "
                f"parameters; take more tiles, such as TiledStrategy({more})."
            )

    @override
    def teardown(self) -> None:
        """End the threads of the tiles; what still lives is on the device again.

        Buffers into which fields were written are whole again.
        """
        parts = [] if self._grid is None else self._module.modules()
        for part in parts:
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, gather(buffer))
        super().teardown()
        if self._grid is not None:
            self._grid.close()
        if self._pager is not None:
            self._pager.close()
        self._grid = self._pager = None


register(
    StrategyRegistry,
    TiledStrategy,
    TiledStrategy.strategy_name,
    "fields in tiles on one device, each operation for all of them",
)
