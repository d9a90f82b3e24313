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

from lightning_shard.lightning import Trainer, TrainerFn, rank_zero_warn
from lightning_shard.trainer.hidden import hidden
from lightning_shard.trainer.host import hook_of
from lightning_shard.trainer.random_state import random_state, same_numbers, set_random_state

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

    @contextmanager
    def of_pass(self, loader: DataLoader[Any], seeded: bool = False) -> Generator[None]:
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


class OrderedBatches:
    """Yields the batches of a training loader, in an order drawn from known random numbers.

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
        """Take the place of the loader's batch sampler.

        Args:
            loader: A training loader of the trainer.
            trainer: Its counters say how many batches were read before a run was resumed.
            generator: The sampler's own generator.
            resumed: Returns the numbers from which the order of a resumed epoch was drawn.
            saved: Returns the state that the sampler's own generator had in the run that is
                resumed.
        """
        self.common: CommonDraws | None = None
        self.inner: Any = loader.batch_sampler
        self.loader, self.trainer, self.generator = loader, trainer, generator
        self.resumed, self.saved = resumed, saved
        self.agreed: Numbers | None = None
        self.drawn_from: Numbers | None = None
        self.has_begun, self._passes = False, 0

    def __iter__(self) -> Iterator[Any]:
        self.has_begun = True
        # a loader with workers asks twice, and reads one
        return self._one_pass(self.agreed, self.common)

    def begin_epoch(self) -> None:
        """Note that the pass over the loader that comes next has not begun."""
        self.has_begun, self.drawn_from = False, None

    def order(self) -> Numbers | None:
        """Return the numbers from which the order of this epoch was drawn.

        They are empty if the pass has begun and drawn the seed of workers, but no order yet, and
        None if it has not begun.
        """
        return {} if self.has_begun and self.drawn_from is None else self.drawn_from

    def _read_before(self) -> int | None:
        """Count the batches of the epoch that is resumed which were read; None if one begins."""
        loop = self.trainer.fit_loop
        goes_on = loop.restarting or (loop.is_resuming and self.resumed() is not None)
        if self._passes or not self.trainer.training or not goes_on:
            return None
        current: Any = loop.epoch_loop.batch_progress.current  # Lightning: its base class
        read = current.processed  # one more may have begun
        if read >= len(self):  # the epoch was at its end
            return None
        return read if read or self.resumed() is not None else None

    def is_resumed(self) -> bool:
        """Return True if the pass that begins now had begun before the run was resumed."""
        return self._read_before() is not None

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

    def _one_pass(self, agreed: Numbers | None, common: CommonDraws | None) -> Iterator[Any]:
        read, before = self._read_before(), self.numbers()
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
            with nullcontext() if common is None else common.of_pass(self.loader, read is not None):
                used = self.drawn_from = self.numbers()
                first, batches = self._drawn()
            if not same_numbers(before, used):
                self._set(before)
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
        return list(islice(batches, read, read + 1)), batches

    def _set(self, numbers: Numbers) -> None:
        set_random_state(numbers, CPU)
        if self.generator is not None and numbers["sampler"] is not None:
            self.generator.set_state(numbers["sampler"])

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in self.__dict__:  # a copy is made
            raise AttributeError(name)
        return getattr(self.__dict__["inner"], name)


def draw_seed(generator: torch.Generator | None) -> None:
    """Draw what a loader draws as it begins: the seed of its workers."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


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
        self._loaders: list[tuple[DataLoader[Any], type[DataLoader[Any]], OrderedBatches]] = []
        self._begun: dict[int, Iterator[Any]] = {}

    def put_off(self, loader: DataLoader[Any], batches: OrderedBatches) -> type[DataLoader[Any]]:
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
    loader: DataLoader[Any], batches: OrderedBatches, until_end: ExitStack, late: LateStart | None
) -> None:
    """Let a loader read `batches`, in place, until the stage ends.

    Args:
        loader: The loader of these batches.
        batches: The batches in order.
        until_end: Closed when the stage of the trainer ends.
        late: Begins the loader, unless Lightning does.
    """
    until_end.callback(_replace, loader, loader.batch_sampler, type(loader))
    _replace(loader, batches, late.put_off(loader, batches) if late else type(loader))
    if late:
        # Lightning warns that a loader without `state_dict` cannot be resumed
        until_end.enter_context(hidden("You're resuming from a checkpoint that ended before"))


def _replace(loader: DataLoader[Any], batches: Any, cls: type) -> None:
    object.__setattr__(loader, "batch_sampler", batches)  # DataLoader refuses a plain assignment
    loader.__class__ = cls  # else a resumed pass begins too early (tests/checkpoint/test_resume.py)


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
