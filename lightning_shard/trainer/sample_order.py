"""Decides which samples each rank reads: those of plain Lightning's steps, on every mesh.

The ranks of a domain read alike. Data replicas draw one order, from the random numbers of the first
rank, and each takes its stride: a step of several replicas reads the samples that one replica reads
with as many times the batch size. Ranks agree as each epoch begins, so numbers that one rank alone
has drawn meanwhile, say for a picture, change nothing.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
)
from typing_extensions import override

from lightning_shard.lightning import (
    Callback,
    LightningModule,
    Trainer,
    TrainerFn,
    pl_worker_init_function,
    rank_zero_warn,
)
from lightning_shard.processes.torch_private.internals import tree_leaves
from lightning_shard.trainer.between_batches import follow_batches
from lightning_shard.trainer.callbacks.repeat_samples import repeats_samples
from lightning_shard.trainer.held_signals import OutlivesSignals
from lightning_shard.trainer.host import add_once, inject_samplers, own_batches
from lightning_shard.trainer.ordered_batches import (
    CPU,
    CommonDraws,
    LateStart,
    Numbers,
    Order,
    OrderedBatches,
    begins_loaders_anew,
    draw_seed,
    generator_of,
    order_of,
    put_into,
)
from lightning_shard.trainer.random_state import (
    SharedNumbers,
    random_state,
    seeded,
    share_random_state,
    share_seeded_state,
)
from lightning_shard.trainer.replica_samplers import (
    EachOnce,
    Stride,
    count_replicas_in,
    draw_alike,
    drops_last,
    given_seed,
    own_sampler,
    read_in_order,
    set_sampler,
    with_sampler,
)
from lightning_shard.trainer.stream_order import StreamOrder


class SampleOrder:
    """Gives loaders the samples of a replica, in an order that can be resumed.

    Attributes:
        numbers: Keeps the random numbers of the ranks of a domain alike.
    """

    def __init__(self) -> None:
        """Begin without a trainer."""
        self.numbers = SharedNumbers()
        self._asked: bool | None = None  # whether the user lets samplers be replaced
        self._ordered: list[Order] = []  # those of the training loaders
        self._late = LateStart()
        self._trains = False
        self._until_end = ExitStack()

    def begin_stage(
        self,
        trainer: Trainer,
        domain: DeviceMesh,
        *,
        replicas: int,
        replica: int,
        device: torch.device,
    ) -> None:
        """Choose in place of Lightning the samples of each rank, but not for predictions.

        Of those Lightning gives each data replica its part. One replica reads as one process does.
        """
        self._trainer, self._domain, self._device = trainer, domain, device
        self._replicas, self._replica = replicas, replica
        self._ordered, self._late, self._trains = [], LateStart(), False
        self._repeat = repeats_samples(trainer)
        asked = inject_samplers(trainer, False)
        self._asked = asked if self._asked is None else self._asked
        several = replicas > 1 and trainer.state.fn == TrainerFn.PREDICTING
        inject_samplers(trainer, self._asked and several)
        share_seeded_state(device)
        alike = _EpochsBeginAlike(self._agree, self._begin_training, self._go_on_after_validation)
        add_once(trainer, alike, first=True)

    def share_numbers(self) -> None:
        """Let the ranks of a domain draw the same random numbers, now and before each batch."""
        share_random_state(self._domain, self._device)
        self.numbers.follow(self._domain, self._device)
        follow_batches(self._trainer, self.numbers.agree)

    def comes_to(self, barrier: str | None) -> None:
        """Begin a list of training loaders if Lightning asks for them after this barrier."""
        if barrier == "train_dataloader()":
            self._ordered = []

    def prepare(
        self,
        loader: DataLoader[Any],
        resumed: Callable[[int], Numbers | None],
        saved: Callable[[int], Tensor | None],
        *,
        late: bool,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's samples.

        Args:
            loader: A loader of all samples.
            resumed: Returns the numbers from which a checkpoint's order was drawn, by the number
                of the loader.
            saved: Returns the state of a sampler's own generator in a checkpoint, likewise.
            late: True if the stage begins with a checkpoint.
        """
        order = order_of(loader) if self._trainer.training else None
        if order is not None:  # the loader was read before
            order.begin_epoch()
            self._order(order)
            return loader
        sampler = own_sampler(loader)
        sampler = sampler.filled if isinstance(sampler, EachOnce) else sampler
        if isinstance(sampler, Stride):  # a `CombinedLoader` keeps it from another stage
            loader = with_sampler(loader, sampler.whole)
        generator = generator_of(loader)
        count_replicas_in(loader, self._replicas, self._replica)
        if self._replicas > 1:
            if self._trainer.state.fn == TrainerFn.PREDICTING:
                draw_alike(loader)
            elif self._asked:
                loader = self._of_replica(loader)
            if not self._trainer.training and not self._repeat:
                self._read_each_once(loader)
        self._begin_workers(loader)
        if read_in_order(loader):
            self._until_end.callback(setattr, loader, "in_order", False)
        if self._trainer.training and not hasattr(loader, "state_dict"):
            here = len(self._ordered)
            if self._trains and self._trainer.current_epoch:  # a later epoch asks for it
                resumed = saved = _nothing
                is_own = generator is not None and loader.generator is generator
                if is_own and not begins_loaders_anew(self._trainer):
                    draw_seed(generator)  # as where Lightning begins it twice
            cls = StreamOrder if isinstance(loader.dataset, IterableDataset) else OrderedBatches
            order = cls(
                loader, self._trainer, generator, partial(resumed, here), partial(saved, here)
            )
            begins_late = late and not self._late.is_over
            put_into(loader, order, self._until_end, self._late if begins_late else None)
            self._order(order)
        return loader

    def _order(self, order: Order) -> None:
        self._ordered.append(order)
        self._agree(self._ordered)

    def drawn_from(self) -> list[Numbers | None]:
        """Return the numbers from which the trainer's loaders drew the order of this epoch."""
        epoch: Any = self._trainer.fit_loop.epoch_progress.current  # Lightning: its base class
        if epoch.processed and epoch.processed == epoch.ready:
            return []  # it is over
        return [batches.order() for batches in _ordered(self._trainer)]

    def own_states(self) -> list[Tensor | None]:
        """Return the states of the generators that the samplers of the loaders were given."""
        return [
            batches.generator.get_state() if batches.generator is not None else None
            for batches in _ordered(self._trainer)
        ]

    def end_stage(self) -> None:
        """Give back loaders as they were."""
        self._until_end.close()

    def _of_replica(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        sampler = own_sampler(loader)
        data: Any = loader.dataset
        if isinstance(sampler, DistributedSampler) or isinstance(data, IterableDataset):
            return loader
        evaluates = self._trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        if self._repeat and evaluates and len(sampler) % self._replicas:
            rank_zero_warn(
                f"{len(sampler)} samples are evaluated on {self._replicas} data replicas, so some "
                "are counted twice; without the callback RepeatSamples each is counted once."
            )
        place = (self._replicas, self._replica)
        # as an epoch of training begins, replicas agree on their numbers
        seed = None if self._trainer.training else given_seed()
        part = Stride(sampler, *place, seed, whole_batches=drops_last(loader))
        # a batch sampler of the user may read it as it is made
        if self._trainer.training:
            with seeded(given_seed() + self._trainer.current_epoch):
                return with_sampler(loader, part)
        each_once = EachOnce(part, whole_batches=drops_last(loader))
        return with_sampler(loader, part if self._repeat else each_once)

    def _read_each_once(self, loader: DataLoader[Any]) -> None:
        """Take from a loader, in place, the samples that its sampler repeats to fill a replica."""
        sampler = own_sampler(loader)
        if type(sampler) is DistributedSampler:
            batches = own_batches(loader)
            reader = loader if batches is None else batches
            set_sampler(reader, EachOnce(sampler, whole_batches=drops_last(loader)))
            self._until_end.callback(set_sampler, reader, sampler)

    def _begin_workers(self, loader: DataLoader[Any]) -> None:
        """Seed workers by the replica, so that the ranks of a domain augment alike.

        In a training they outlive signals, until their rank has saved.
        """
        begins: Any = loader.worker_init_fn
        self._until_end.callback(setattr, loader, "worker_init_fn", begins)
        asked = self._replicas > 1 or os.environ.get("PL_SEED_WORKERS", "0") == "1"
        if begins is None and asked:
            begins = partial(pl_worker_init_function, rank=self._replica)
        if loader.num_workers and self._trainer.state.fn == TrainerFn.FITTING:
            begins = OutlivesSignals(begins)
        loader.worker_init_fn = begins

    def _begin_training(self) -> None:
        """Note that the training begins, perhaps in an epoch that has nothing left to read."""
        self._trains = True
        _warn_of_reloads(self._trainer)
        if not self._trainer.fit_loop.restarted_mid_epoch:
            return
        if not any(batches.is_resumed() for batches in self._ordered):  # all of it was read
            self._late.is_over = True
            for batches in self._ordered:
                batches.restore()

    def _go_on_after_validation(self) -> None:
        """Let the passes that begin in the rest of the epoch follow what the validation has drawn.

        Those are further passes over the shorter loaders of a cycle.
        """
        if self._replicas > 1 and len(self._ordered) > 1 and not self._trainer.sanity_checking:
            numbers = [random_state(CPU)]
            dist.broadcast_object_list(numbers, src=0, device=self._device)
            for batches in self._ordered:
                if batches.common is not None:
                    batches.common.state = numbers[0]

    def _agree(self, found: Sequence[Order] | None = None) -> None:
        share_random_state(self._domain, self._device)
        begins = found is None  # an epoch
        ordered = _ordered(self._trainer) if found is None else found
        has_begun = (
            begins
            and not begins_loaders_anew(self._trainer)
            and any(batches.has_begun for batches in ordered)
        )
        if begins and not has_begun:
            for batches in ordered:
                batches.begin_epoch()
        if self._replicas == 1:
            return
        numbers = [[batches.numbers() for batches in ordered]]
        dist.broadcast_object_list(numbers, src=0, device=self._device)
        if not ordered:
            return
        if has_begun:
            if ordered[0].common is not None:  # all loaders have the same
                ordered[0].common.begin(numbers[0][0])
            return
        common = CommonDraws([batches.loader for batches in ordered], numbers[0][0])
        for batches, agreed in zip(ordered, numbers[0], strict=True):
            batches.agreed, batches.common = agreed, common


class _EpochsBeginAlike(Callback):
    """Begins epochs alike on all ranks before callbacks draw, but none that is resumed inside."""

    def __init__(
        self,
        agree: Callable[[], None],
        begin_training: Callable[[], None],
        go_on_after_validation: Callable[[], None],
    ) -> None:
        self._agree, self._begin_training = agree, begin_training
        self._go_on_after_validation = go_on_after_validation

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_training()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agree()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._go_on_after_validation()


def _nothing(loader: int) -> None:
    """Stand for what a resumed run had saved of a loader, for one that is asked for later."""


def _warn_of_reloads(trainer: Trainer) -> None:
    """Warn that a run without a break would ask for its loaders in other epochs."""
    every: int = vars(trainer)["reload_dataloaders_every_n_epochs"]
    if every and trainer.current_epoch % every:
        rank_zero_warn(
            f"Lightning counts reload_dataloaders_every_n_epochs={every} from the epoch in which a "
            f"run is resumed, which is {trainer.current_epoch}, so loaders are asked for in other "
            f"epochs than in a run without a break; resume a checkpoint of an epoch that {every} "
            "divides, or ask for them in every epoch (1)."
        )


def _ordered(trainer: Trainer) -> list[Order]:
    leaves = tree_leaves(trainer.train_dataloader)
    orders = [order_of(leaf) for leaf in leaves if isinstance(leaf, DataLoader)]
    return [order for order in orders if order is not None]
