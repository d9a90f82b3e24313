"""Draws the order of a training loader from random numbers that are known, and so can be resumed.

A loader draws its order from the default random numbers as an epoch begins, as in one process. The
numbers from which it was drawn are in the checkpoints of the epoch. A resumed run draws the same
order from them, skips what was read, and goes on with the numbers of the checkpoint. No sample is
loaded in vain, and the mesh may be another one.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.lightning import Trainer, TrainerFn, rank_zero_warn
from lightning_shard.trainer.hidden import hidden
from lightning_shard.trainer.host import hook_of
from lightning_shard.trainer.random_state import (
    random_state,
    same_numbers,
    set_random_state,
    storable,
)
from lightning_shard.trainer.replica_samplers import refuse_unread
from lightning_shard.trainer.streams import length_of

CPU = torch.device("cpu")

Numbers = dict[str, Any]


class CommonDraws:
    """The random numbers from which loaders draw their orders in one epoch, one after another.

    A loader draws the seed of its workers as it begins, and its order before its first batch. With
    workers it asks for the first batch as it begins; without, once all loaders have begun. Data
    replicas must draw so, too, though each has drawn other numbers meanwhile.

    Attributes:
        state: The numbers that are drawn next.
    """

    def __init__(self, loaders: Sequence[DataLoader[Any]], agreed: Numbers) -> None:
        """Begin an epoch.

        Args:
            loaders: The training loaders of the Trainer, in the order in which they begin.
            agreed: The numbers that all ranks have.
        """
        self._loaders, self.state = loaders, agreed
        self._seeded = 0  # loaders that have drawn the seed of their workers
        self._read = set[int]()  # loaders that have drawn an order
        self._is_resumed = False

    def begin(self, agreed: Numbers) -> None:
        """Take the numbers that all ranks have once the loaders have begun, unless one was read."""
        if not self._read:
            self.state, self._seeded = agreed, len(self._loaders)

    def go_on(self, resumed: Numbers | None) -> None:
        """Go on with the numbers of the run that is resumed, in which all loaders were read."""
        if self._is_resumed:
            return
        self._is_resumed = True
        self.state = (resumed or {}).get("next", self.state)
        self._seeded, self._read = len(self._loaders), {*range(len(self._loaders))}

    @contextmanager
    def of_pass(self, loader: DataLoader[Any], *, seeded: bool = False) -> Generator[None]:
        """Go on with the numbers that this loader draws next; inside, it draws its order.

        Args:
            loader: One of the loaders.
            seeded: True if all loaders had drawn the seeds of their workers before the run was
                resumed.
        """
        set_random_state(self.state, CPU)
        if seeded:
            self._seeded = len(self._loaders)
        place = next(i for i, each in enumerate(self._loaders) if each is loader)
        begun = place + 1 if loader.num_workers else len(self._loaders)
        again = place in self._read  # a short loader of a cycle
        for each in [loader] if again else self._loaders[self._seeded : begun]:
            if each.generator is None:
                draw_seed(None)
        self._seeded = max(self._seeded, begun)
        self._read.add(place)
        yield
        self.state = random_state(CPU)


class Order:
    """The order of a training loader, and the numbers from which it is drawn.

    `OrderedBatches` is that of a loader with indices, `StreamOrder` that of a stream.

    Attributes:
        agreed: The state of the sampler's own generator on all ranks, for the next pass.
        common: The numbers from which the next pass draws its order; None: those that this process
            then has.
        drawn_from: The numbers from which the order of this pass was drawn.
        has_begun: True once a loader has begun the pass of this epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        trainer: Trainer,
        generator: torch.Generator | None,
        resumed: Callable[[], Numbers | None],
        saved: Callable[[], Tensor | None],
    ) -> None:
        """Follow a loader.

        Args:
            loader: A training loader of the trainer.
            trainer: Its counters say how many batches were read before a run was resumed.
            generator: The sampler's own generator.
            resumed: Returns the numbers from which the order of a resumed epoch was drawn.
            saved: Returns the state that the sampler's own generator had in the run that is
                resumed.
        """
        self.common: CommonDraws | None = None
        self.loader, self.trainer, self.generator = loader, trainer, generator
        self.resumed, self.saved = resumed, saved
        self.agreed: Numbers | None = None
        self.drawn_from: Numbers | None = None
        self.has_begun, self._passes = False, 0

    def put_into_loader(self, until_end: ExitStack) -> None:
        """Let the loader follow this order, in place, until the stage ends."""
        raise NotImplementedError

    def begin_epoch(self) -> None:
        """Note that the pass over the loader that comes next has not begun."""
        self.has_begun, self.drawn_from = False, None

    def order(self) -> Numbers | None:
        """Return the numbers from which the order of this epoch was drawn.

        They are empty if the pass has begun and drawn the seed of workers, but no order yet, and
        None if it has not begun. In a cycle they are those of the last pass. On data replicas
        "next" has the numbers of the next pass.
        """
        found = {} if self.has_begun and self.drawn_from is None else self.drawn_from
        if not found or self.common is None:
            return found
        return found | {"next": storable(self.common.state)}

    def read_in_epoch(self) -> int | None:
        """Count the batches of the resumed epoch that were read; None where none is left to read.

        None, too, where no epoch is resumed, or this loader has begun another pass.
        """
        loop = self.trainer.fit_loop
        goes_on = loop.restarting or (loop.is_resuming and self.resumed() is not None)
        if self._passes or not self.trainer.training or not goes_on:
            return None
        progress = loop.epoch_loop.batch_progress
        current: Any = progress.current  # Lightning: its base class
        return None if progress.is_last_batch else current.processed  # one more may have begun

    def read_in_pass(self) -> int | None:
        """Count the batches of the resumed pass that were read; None if a pass begins."""
        read, length = self.read_in_epoch(), length_of(self.loader)
        if read and length:  # the epoch may read a short loader several times
            read = read % length or None
        return read if read or self.resumed() is not None else None

    def is_resumed(self) -> bool:
        """Return True if the pass that begins now had begun before the run was resumed."""
        return self.read_in_pass() is not None

    def numbers(self) -> Numbers:
        """Read what the generators of this process, and the sampler's own, will draw next."""
        own = self.generator.get_state() if self.generator is not None else None
        return random_state(CPU) | {"sampler": own}

    def restore(self) -> None:
        """Give the sampler's own generator the state with which the saved run went on."""
        saved = self.saved()
        if self.generator is not None and saved is not None:
            self.generator.set_state(saved)
            if self.agreed is not None:
                self.agreed = self.agreed | {"sampler": saved}

    def _set(self, numbers: Numbers) -> None:
        set_random_state(numbers, CPU)
        if self.generator is not None and numbers["sampler"] is not None:
            self.generator.set_state(numbers["sampler"])


class OrderedBatches(Order):
    """Yields the batches of a loader, in an order drawn from known random numbers.

    It takes the place of the loader's batch sampler, or of its sampler where that yields batches.
    """

    def __init__(self, loader: DataLoader[Any], *rest: Any) -> None:
        """Follow a loader; `rest` is what `Order` takes."""
        super().__init__(loader, *rest)
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.inner: Any = getattr(loader, self._name)

    @override
    def put_into_loader(self, until_end: ExitStack) -> None:
        """Take the place of what yields the indices, in place, until the stage ends."""
        # DataLoader refuses a plain assignment
        until_end.callback(object.__setattr__, self.loader, self._name, self.inner)
        object.__setattr__(self.loader, self._name, self)

    def __iter__(self) -> Iterator[Any]:
        self.has_begun = True
        # a loader with workers asks twice, and reads one
        return self._one_pass(self.agreed, self.common)

    def _one_pass(self, agreed: Numbers | None, common: CommonDraws | None) -> Iterator[Any]:
        read, before = self.read_in_pass(), self.numbers()
        if common is not None and self.read_in_epoch():
            common.go_on(self.resumed())
        self._passes += 1
        if read is not None and self.resumed() != {}:
            first, batches = self._drawn_again(read)
            set_random_state(before, CPU)  # the sampler's own generator goes on
        else:
            if agreed is not None and self.generator is not None:
                self.generator.set_state(agreed["sampler"])
                self.agreed = None  # for a further pass of this epoch it goes on
                if read is None and self.loader.generator is self.generator:
                    draw_seed(self.generator)
            if read is not None:
                self.restore()
            with (
                nullcontext()
                if common is None
                else common.of_pass(self.loader, seeded=read is not None)
            ):
                used = self.drawn_from = self.numbers()
                first, batches = self._drawn()
                has_drawn = not same_numbers(used, self.numbers())
            if not same_numbers(before, used):
                self._set(before)
                if has_drawn:
                    next(iter(self.inner), None)  # as many numbers as it takes
        yield from first
        yield from batches

    def _drawn_again(self, read: int) -> tuple[list[Any], Iterator[Any]]:
        resumed = self.resumed()
        if resumed is not None:
            self._set(resumed)
        used = self.drawn_from = self.numbers()
        found = self._drawn(read)
        if resumed is None and not same_numbers(used, self.numbers()):
            rank_zero_warn(
                "the checkpoint was saved inside an epoch and does not say in which order the "
                "samples were read, so some are read again in this epoch and some are not."
            )
        return found

    def _drawn(self, read: int = 0) -> tuple[list[Any], Iterator[Any]]:
        """Return the first batch, with which an order is drawn, and those after it."""
        batches = iter(self.inner)
        first = list(islice(batches, read, read + 1))
        refuse_unread(self.inner)
        return first, batches

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:  # a copy is made
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


def order_of(loader: DataLoader[Any]) -> Order | None:
    """Return the order that a loader follows; None if it follows none of ours."""
    places = (loader.batch_sampler, loader.sampler, getattr(type(loader), "order", None))
    return next((place for place in places if isinstance(place, Order)), None)


def draw_seed(generator: torch.Generator | None) -> None:
    """Draw what a loader draws as it begins: the seed of its workers."""
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """Find the generator that a loader's sampler was given."""
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    found = (getattr(sampler, "generator", None) for sampler in samplers)
    return next((generator for generator in found if isinstance(generator, torch.Generator)), None)


class LateStart:
    """Begins the loaders of a resumed run, all at once, when the first of them is read.

    Lightning begins them before it has resumed, with other random numbers.

    Attributes:
        is_over: True once they have begun.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._loaders: list[tuple[DataLoader[Any], type[DataLoader[Any]], Order]] = []
        self._begun: dict[int, Iterator[Any]] = {}

    def put_off(self, loader: DataLoader[Any], batches: Order) -> type[DataLoader[Any]]:
        """Return a class for the loader, of which a pass begins when its first batch is read."""
        cls = type(loader)
        self._loaders.append((loader, cls, batches))

        def iterate(itself: DataLoader[Any]) -> Iterator[Any]:
            return cls.__iter__(itself) if self.is_over else self._batches(itself)

        return type(cls.__name__, (cls,), {"__iter__": iterate})

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not self.is_over:
            self.is_over = True
            for each, cls, batches in self._loaders:
                before = random_state(CPU) if batches.is_resumed() else None
                if before is None:
                    batches.restore()
                self._begun[id(each)] = cls.__iter__(each)
                if before is not None:  # this pass began in the run that is resumed
                    set_random_state(before, CPU)
        yield from self._begun.pop(id(loader))


def put_into(
    loader: DataLoader[Any], order: Order, until_end: ExitStack, late: LateStart | None
) -> None:
    """Let a loader follow `order`, in place, until the stage ends.

    Args:
        loader: The loader of this order.
        order: Its order.
        until_end: Closed when the stage of the trainer ends.
        late: Begins the loader, unless Lightning does.
    """
    # else a resumed pass begins too early (tests/checkpoint/test_resume.py)
    until_end.callback(setattr, loader, "__class__", type(loader))
    order.put_into_loader(until_end)
    if late:
        loader.__class__ = late.put_off(loader, order)
        # Lightning warns that a loader without `state_dict` cannot be resumed
        until_end.enter_context(hidden("You're resuming from a checkpoint that ended before"))


def begins_loaders_anew(trainer: Trainer) -> bool:
    """Return whether Lightning begins the loaders of an epoch after its first hooks.

    It has begun those of the first epoch, and of one that is resumed, before these hooks.
    """
    fit = trainer.fit_loop
    return trainer.current_epoch > 0 and not (fit.is_resuming or fit.epoch_loop.restarting)


def unfinished(trainer: Trainer) -> tuple[str, int] | None:
    """Name the training step, or the validation after it, that has begun and not ended."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current  # Lightning: its base class
    if current.ready > current.processed:
        return "step", progress.total.ready
    in_validation = trainer.state.fn == TrainerFn.FITTING and trainer.validating
    ends = hook_of(trainer.lightning_module) == "on_validation_end"
    return ("validation", progress.total.ready) if in_validation and not ends else None
