"""Finds the least number of tiles with which one step fits into the memory that there is."""

import copy
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.data.tree import leaves_of
from lightning_shard.lab.batches import Stage, first_batches
from lightning_shard.lab.predict import predict
from lightning_shard.lightning import LightningDataModule, LightningModule
from lightning_shard.memory.free import free_bytes, free_here
from lightning_shard.memory.sizes import bytes_of, size_in_words
from lightning_shard.trainer.random_state import random_state, set_random_state

# a share of what is free: the rest is for workspaces of kernels, and for gaps between tensors. Nine
# trainings took 0.95 to 1.16 times what is predicted
SHARE = 0.75
MOST = 256  # tiles, of which a step takes long


@dataclass(frozen=True)
class LeastTiles:
    """The least number of tiles that fits.

    Attributes:
        tiles: The number.
        needs: Bytes that a step needs with it, as predicted.
        room: Bytes that there are for it.
        where: The place of this memory, in words.
    """

    tiles: int
    needs: int
    room: int
    where: str

    def __str__(self) -> str:
        return (
            f"{self.tiles} tile{'s' * (self.tiles > 1)}: a step needs {size_in_words(self.needs)} "
            f"of {size_in_words(self.room)}, {SHARE:.0%} of what is free {self.where}"
        )


def least_tiles(
    module: LightningModule,
    data: Any,
    device: torch.device,
    tile_memory: str | None = None,
    tile_budget: str | None = None,
    *,
    stage: Stage = "fit",
    keeps_parameters: bool = False,
    **options: Any,
) -> LeastTiles:
    """Return the least number of tiles along the first split dim with which a step fits.

    One tile's step is rehearsed without numbers for 1, 2, 4 tiles and so on, and then between the
    last two. The first batch is read for that, from a copy of the data module.

    Args:
        module: The module, which stays as it is.
        data: A data module, a DataLoader, or None where the module has loaders.
        device: The one device.
        tile_memory: A directory in whose files waiting tiles lie.
        tile_budget: Bytes that tiles may keep on the device, which a step then needs in any case.
        stage: The step that is rehearsed.
        keeps_parameters: True if the parameters stay on the device, whole.
        options: Further arguments of `predict`, such as `shard_dims` and `precision`.

    Raises:
        ValueError: The memory is not known, no number of tiles is enough, or the budget is larger
            than what a step may take.
    """
    room, where = free_memory(device, tile_memory)
    budget = 0 if tile_budget is None else bytes_of(tile_budget, "tile_budget")
    if budget > SHARE * room:
        raise ValueError(
            f"tile_budget is {size_in_words(budget)}, but a step may take "
            f"{size_in_words(int(SHARE * room))}, {SHARE:.0%} of what is free {where}; give less."
        )
    state = random_state(device)
    try:
        with redirect_stdout(io.StringIO()):  # a rehearsal prints nothing
            data = _copied(data, module, stage)
            batch = first_batches(module, data, stage)[0]
            needs = _needs(module, data, batch, device, keeps_parameters, stage=stage, **options)
            share = int(SHARE * room)
            tiles, least = fewest(lambda tiles: max(budget, needs(tiles)), share)
    finally:
        set_random_state(state, device)
    if least > share:
        raise ValueError(
            f"no number of tiles is enough: {tiles} need {size_in_words(least)}, but a step may "
            f"take {size_in_words(share)}, {SHARE:.0%} of what is free {where}. Take tiles along "
            "two dims, such as 4x4, or a smaller batch."
        )
    return LeastTiles(tiles, int(least), share, where)


def fewest(
    needs: Callable[[int], float], room: float, *, first: int = 1, most: int = MOST
) -> tuple[int, float]:
    """Return the least number of tiles that fits, and what it needs.

    Numbers are doubled until one fits, and then tried between the last two. Where more tiles need
    no less, none fits: then the number that needs least is returned.

    Args:
        needs: Returns the bytes that a step needs with so many tiles.
        room: The bytes that there are.
        first: The number to begin with; half of it does not fit.
        most: The largest number to try.
    """
    found = {first: needs(first)}
    tiles = first
    while found[tiles] > room and 2 * tiles <= most:
        tiles *= 2
        found[tiles] = needs(tiles)
        if found[tiles] >= found[tiles // 2]:  # more tiles leave more small tensors there
            break
    if found[tiles] > room:
        return min(found.items(), key=lambda pair: pair[1])
    too_few = tiles // 2
    while tiles - too_few > 1:
        middle = (too_few + tiles) // 2
        found[middle] = needs(middle)
        too_few, tiles = (too_few, middle) if found[middle] <= room else (middle, tiles)
    return tiles, found[tiles]


def _needs(
    module: LightningModule,
    data: Any,
    batch: Any,
    device: torch.device,
    keeps_parameters: bool,
    **options: Any,
) -> Callable[[int], int]:
    own = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    whole = sum(x.nbytes for x in leaves_of(batch) if isinstance(x, Tensor))

    def needs(tiles: int) -> int:
        memory = predict(module, data, tiles=tiles, tile_budget="0", **options).memory
        memory += own if keeps_parameters else 0
        return memory if device.type != "cpu" else memory + whole  # the batch is in memory, too

    return needs


def _copied(data: Any, module: LightningModule, stage: Stage) -> Any:
    if isinstance(data, LightningDataModule):
        return copy.copy(data)
    if isinstance(data, DataLoader):
        return data
    return module.train_dataloader() if data is None and stage == "fit" else data


def free_memory(device: torch.device, tile_memory: str | None) -> tuple[int, str]:
    """Return the bytes that a step may take, and where they are, in words.

    Raises:
        ValueError: They are not known, or tiles on a CPU have no files in which to wait.
    """
    if device.type != "cpu":
        if (free := free_bytes(device)) is None:
            raise ValueError(f"the free memory of {device} is not known; give a number of tiles.")
        return free, f"on {device}"
    if tile_memory is None:
        raise ValueError(
            "tiles save nothing on a CPU unless they wait in files; give tile_memory, a directory "
            "on a disk, or a number of tiles."
        )
    return free_here()
