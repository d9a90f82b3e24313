"""Gives a data replica its part of the samples, and each sample to one replica."""

import math
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler
from typing_extensions import override

from lightning_shard.lightning import (
    UnrepeatedDistributedSamplerWrapper,
    rank_zero_info,
    update_dataloader,
)
from lightning_shard.processes.narrow import is_list
from lightning_shard.trainer.host import own_batches
from lightning_shard.trainer.random_state import seeded


def with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """Make a loader like `loader` that reads what `sampler` says."""
    found = update_dataloader(loader, sampler)
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler and loader.batch_size is None:
        # Lightning forgets the batches that a loader was given; DataLoader refuses an assignment
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        for name, value in (("batch_sampler", batches), ("batch_size", None)):
            object.__setattr__(found, name, value)
    return found


def own_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader's samples; that of its batches, where it was given batches."""
    found = getattr(own_batches(loader), "sampler", None)
    return loader.sampler if found is None else found


def drops_last(loader: DataLoader[Any]) -> bool:
    """Return whether a loader drops the samples that fill no batch."""
    return bool(getattr(own_batches(loader), "drop_last", False))


def set_sampler(reader: Any, sampler: Any) -> None:
    """Let a loader, or the batch sampler of one, read another sampler."""
    object.__setattr__(reader, "sampler", sampler)  # a loader refuses a plain assignment


def count_replicas_in(loader: DataLoader[Any], replicas: int, replica: int) -> None:
    """Let torch's sampler, which counts all ranks by default, and streams count data replicas."""
    _count_in_stream(loader.dataset, replicas, replica)
    sampler = own_sampler(loader)
    if type(sampler) is not DistributedSampler or sampler.num_replicas == replicas:
        return
    if sampler.num_replicas == dist.get_world_size():
        epoch, options = sampler.epoch, (sampler.shuffle, sampler.seed, sampler.drop_last)
        DistributedSampler.__init__(sampler, sampler.dataset, replicas, replica, *options)
        sampler.epoch = epoch


def _count_in_stream(dataset: Any, replicas: int, replica: int) -> None:
    """Let a streaming dataset of litdata, or several in one, share samples out over data replicas.

    It takes the number of processes from WORLD_SIZE, and its own number from torch, which counts
    replicas in a run. So all ranks of a domain would read one part, and nobody the rest.
    """
    env: Any = getattr(dataset, "distributed_env", None)
    if all(hasattr(env, name) for name in ("world_size", "global_rank", "num_nodes")):
        env.world_size, env.global_rank = replicas, replica
        env.num_nodes = math.gcd(env.num_nodes, replicas)
    several = getattr(dataset, "_datasets", None)
    for each in several if is_list(several) else ():
        _count_in_stream(each, replicas, replica)


def read_in_order(loader: DataLoader[Any]) -> bool:
    """Let a loader yield batches in the order of its sampler, whichever worker is ready first.

    Ranks that share samples would read other batches, and a checkpoint knows how many were read.

    Returns:
        True if the loader was made with `in_order=False`.
    """
    if getattr(loader, "in_order", True):
        return False
    loader.in_order = True
    rank_zero_info(
        "a loader has in_order=False: its batches come in order here, since ranks that share "
        "samples must read the same ones."
    )
    return True


class Stride(DistributedSampler[Any]):
    """Yields the samples of one replica, in the order that a sampler draws for all.

    It draws as many numbers as the sampler, so that what is drawn next is as in one process.

    Attributes:
        whole: The sampler that draws for all.
        is_read: True once something has asked for its samples.
    """

    def __init__(
        self,
        whole: Any,
        replicas: int,
        replica: int,
        seed: int | None = None,
        *,
        whole_batches: bool = False,
    ) -> None:
        """Take every n-th sample.

        Args:
            whole: The sampler that draws for all.
            replicas: Number of data replicas.
            replica: The replica whose samples these are.
            seed: Begins the numbers from which the order is drawn on all replicas; None: all have
                the same numbers.
            whole_batches: True if samples that fill no batch are dropped, as `drop_last=True` of a
                loader: then no sample is repeated so that all replicas have as many.
        """
        super().__init__(whole, replicas, replica, shuffle=False, drop_last=whole_batches)
        self.whole, self._seed = whole, seed
        self.is_read = False

    @override
    def __iter__(self) -> Iterator[Any]:
        self.is_read = True
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        alike = None
        if self._seed is not None:
            alike = _drawn_from(self._seed + self.epoch, self.whole)
        whole = iter(self.whole)
        order = list(islice(whole, len(self.whole)))
        yield from ((alike or order)[place] for place in super().__iter__())
        next(whole, None)  # torch's samplers draw once more at their end, if they are read so far

    @override
    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler that draws for all."""
        super().set_epoch(epoch)
        if hasattr(self.whole, "set_epoch"):
            self.whole.set_epoch(epoch)


def refuse_unread(batches: Any) -> None:
    """Refuse batches that have been drawn without the sampler that divides them among replicas.

    Raises:
        ValueError: A batch sampler of the user's own class does not read its sampler.
    """
    sampler = getattr(batches, "sampler", None)
    sampler = sampler.filled if isinstance(sampler, EachOnce) else sampler
    if isinstance(sampler, Stride) and not sampler.is_read:
        raise ValueError(
            f"{type(batches).__name__} makes batches without reading its `sampler`, so all "
            f"{sampler.num_replicas} data replicas would read the same samples; let it read "
            "`self.sampler`, or pass use_distributed_sampler=False to the Trainer, or to "
            "fabric.setup_dataloaders, and let it yield those of its replica."
        )


def _drawn_from(seed: int, sampler: Any) -> list[Any]:
    """Return the order that a sampler draws from the numbers of a seed, and draw nothing."""
    own: Any = getattr(sampler, "generator", None)
    before = own.get_state() if own is not None else None
    with seeded(seed):
        if own is not None:
            own.manual_seed(seed)
        order = list(islice(sampler, len(sampler)))
    if own is not None:
        own.set_state(before)
    return order


def given_seed() -> int:
    """Return the seed that `seed_everything` was given, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def draw_alike(loader: DataLoader[Any]) -> None:
    """Let the replicas that predict take their parts of one order, in place.

    Lightning gives each replica its part, of an order that each has drawn.
    """
    sampler = own_sampler(loader)
    if isinstance(sampler, UnrepeatedDistributedSamplerWrapper):
        drawn: Any = sampler.dataset
        draw = drawn.reset

        def draw_seeded() -> None:
            with seeded(given_seed()):
                draw()

        drawn.reset = draw_seeded


class EachOnce(DistributedSampler[Any]):
    """Yields the samples of one replica without those that fill it up to as many as others have.

    Attributes:
        filled: The sampler that yields those, too.
        repeats: True if this one does so.
    """

    def __init__(self, filled: DistributedSampler[Any], *, whole_batches: bool) -> None:
        """Leave out what `filled` repeats.

        Args:
            filled: Yields every n-th sample; in the order of all, those that it repeats are last.
            whole_batches: True if samples that fill no batch are dropped, as `drop_last=True` of a
                loader: then replicas have the same number of samples.
        """
        vars(self).update(vars(filled))
        samples = len(filled.dataset)  # pyright: ignore[reportArgumentType]
        mine = len(range(filled.rank, samples, filled.num_replicas))
        number = samples // filled.num_replicas if whole_batches else mine
        self.filled, self._number = filled, min(number, len(filled))
        self.repeats = False

    @override
    def __len__(self) -> int:
        return len(self.filled) if self.repeats else self._number

    @override
    def __iter__(self) -> Iterator[Any]:
        return islice(self.filled, len(self))

    @override
    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler that is filled up."""
        self.filled.set_epoch(epoch)
