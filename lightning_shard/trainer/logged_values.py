"""Compares the names and values that ranks log, where they are reduced and where they decide.

Lightning reduces logged values in the order in which each rank logs them, without their names. So
if ranks log other names, or in another order, each gets the mean of several quantities. A value
that is logged without `sync_dist=True` is each data replica's own, and yet learning rates,
checkpoints and the end of training follow it: there the mean over the replicas decides.
"""

import functools
import math
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_shard.fsdp.same_blocks import SameBlocks, order_of, same_blocks
from lightning_shard.lightning import EarlyStopping, ModelCheckpoint, Trainer, rank_zero_warn
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.trainer.between_batches import follow_batches
from lightning_shard.trainer.host import (
    add_once,
    callbacks_of,
    end_together,
    follow_candidates,
    follow_reductions,
    follow_stopping,
    hook_of,
    not_reduced,
)
from lightning_shard.trainer.peers import Peers
from lightning_shard.trainer.rate_search import follow_search
from lightning_shard.trainer.reduce import divide
from lightning_shard.trainer.same_optimizers import digest_of_optimizers, refuse_other_optimizers
from lightning_shard.trainer.same_steps import SameSteps, WhenRanksCompare
from lightning_shard.trainer.same_weights import refuse_drifted_weights

if TYPE_CHECKING:
    from lightning_shard.trainer.partial_step import PartialStep

_SAME = 1e-6  # relative; a smaller difference is that of sums in another order
_END, _NEXT = "the end of the epoch", "the next batch or epoch"
_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor | None], Tensor]] = {
    "mean": lambda values, weights: (
        divide(values.sum(0), len(values))
        if weights is None
        else (values * weights).sum(0) / weights.sum()
    ),
    "sum": lambda values, _: values.sum(0),
    "max": lambda values, _: values.amax(0),
    "min": lambda values, _: values.amin(0),
}


class LoggedValues:
    """Reduces logged values together with their names, and compares monitored values."""

    def __init__(self, peers: Peers, steps: SameSteps) -> None:
        """Begin without a Trainer.

        Args:
            peers: Tells whether an exception on some of the ranks forbids collectives.
            steps: The steps, which are compared as epochs end.
        """
        self._peers, self._steps = peers, steps
        self._name: str | None = None  # names the value that Lightning reduces now
        self._samples: int | None = None  # samples of that value, if it is one of a step
        self.joined: PartialStep | None = None  # a step for which some ranks have no batch
        self._until_end = ExitStack()
        self._world: Any = None  # all ranks, once a Trainer is followed
        self._unread: list[tuple[str, Tensor, Any]] = []  # on a device; read as the epoch ends
        self._replicas: Sequence[int] = ()
        self._warned: set[str] = set()  # names of values that replicas have logged apart

    def follow(self, trainer: Trainer, device: torch.device, replicas: Sequence[int]) -> None:
        """Follow what a Trainer logs, and the callbacks and schedulers that read it."""
        self._device, self._trainer, self._replicas = device, trainer, replicas
        self._warned.clear()
        self._world = dist.group.WORLD  # within a step the default group may be another one
        if self._world is not None and self._order() is None:
            same_blocks(self._world)
        follow_reductions(trainer, self._reducing)
        follow_batches(trainer, self._go_on)
        end_together(trainer, self._any_rank)
        add_once(trainer, WhenRanksCompare(self._compare_end, self._compare_steps), first=True)
        for callback in callbacks_of(trainer):
            kind = type(callback).__name__
            if isinstance(callback, ModelCheckpoint):
                follow_candidates(callback, functools.partial(self._agreed_candidates, callback))
            elif isinstance(callback, EarlyStopping):
                check = functools.partial(self._agreed, kind=kind, name=callback.monitor)
                follow_stopping(callback, check)

    def follow_schedulers(self, trainer: Trainer) -> None:
        """Follow the schedulers that decide by a value, whoever calls them, until `forget`."""
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                self._follow_plateau(config.scheduler, config.monitor or "the value of step()")

    def _follow_plateau(self, scheduler: ReduceLROnPlateau, name: str) -> None:
        cls = type(scheduler)

        def step(itself: ReduceLROnPlateau, metrics: Any, *args: Any) -> None:
            if self._is_possible():
                self._come_to(f"steps {cls.__name__}")
            cls.step(itself, self._agreed(metrics, kind=cls.__name__, name=name), *args)

        # each replica would take its own rate; a method of the object would lie in its state_dict
        # (tests/trainer/test_logged_values.py)
        scheduler.__class__ = type(cls.__name__, (cls,), {"step": step})
        self._until_end.callback(setattr, scheduler, "__class__", cls)

    def forget(self) -> None:
        """End a stage: schedulers are as they were."""
        self._until_end.close()
        self._unread.clear()
        if self._is_possible() and (order := self._order()) is not None:
            order.leaves()

    # Names.

    @contextmanager
    def _reducing(self, name: str, samples: int | None) -> Generator[None]:
        before = self._name, self._samples
        self._name, self._samples = name, samples
        try:
            yield
        finally:
            self._name, self._samples = before

    def reduces(self, tensor: Any, reduce_op: Any) -> bool:
        """Return True if `tensor` is a number that Lightning reduces for `self.log`."""
        return (
            self._name is not None
            and isinstance(tensor, Tensor)
            and tensor.numel() == 1
            and reduce_op in _REDUCTIONS
            and dist.get_world_size(self._world) > 1
        )

    def reduce(self, tensor: Tensor, group: Any, reduce_op: str, copies: int) -> Tensor:
        """Reduce a number over ranks that all log it under the same name.

        A number and the checksum of its name travel from each rank to all, and with a number of
        an evaluation step that of its samples, by which a mean weighs it.

        Args:
            tensor: The number; it is equal on the ranks that share samples.
            group: The ranks; None: all of them.
            reduce_op: "mean", "sum", "max" or "min".
            copies: Number of ranks that share samples, which a sum over all ranks counts once.

        Raises:
            DisagreementError: The ranks log other names, or in another order; all ranks raise.
        """
        assert self._name is not None
        if self._peers.is_disconnected():
            return tensor
        if reduce_op == "mean" and self._samples is None:
            reduce_op = "sum"  # Lightning divides two of them; a mean of counts is no integer
        over_all = group is None
        group = self._world if over_all else group
        values, tags, samples = self._exchange_among_present(tensor, group, over_all)
        if self._samples is not None and tags.device.type != "cpu":  # reading would wait
            self._unread.append((self._name, tags, group))
        else:
            self._refuse_other_names(self._name, tags, group)
        evaluates = self._samples is not None and not self._trainer.training
        reduced = _REDUCTIONS[reduce_op](values, samples if evaluates else None)
        if reduce_op == "sum" and over_all:
            reduced = divide(reduced, copies)
        return reduced.reshape(tensor.shape).to(tensor.device)

    def _exchange_among_present(
        self, number: Tensor, group: Any, over_all: bool
    ) -> tuple[Tensor, ...]:
        """Exchange the number of the ranks that run this step, together with those that do not."""
        assert self._name is not None
        if self.joined is None and over_all and self._samples is not None:
            # a rank that logs another name comes here, too; then both names are compared
            self._come_to("logs a value with sync_dist=True", f"logs {self._name!r}")
        if self.joined is None or not over_all:
            return self._exchange(number, self._name, group)
        with self.joined.logs_number():
            found = self._exchange(number, self._name, group)
        return tuple(each[self.joined.present] for each in found)

    def _come_to(self, event: str, words: str = "") -> None:
        """Notice in seconds if other ranks do something else here."""
        if (order := self._order()) is not None:
            order.comes_to(event, words)

    def comes_to_in_hook(self, event: str, group: Any = None) -> None:
        """Notice in seconds that others have left a hook, in which this rank speaks to all."""
        hook = hook_of(self._trainer.lightning_module) if self._world is not None else ""
        to_all = group is None or group is self._world
        if to_all and hook.startswith("on_") and self._is_possible():
            self._come_to(f"{event} in {hook}")

    def exchanges(self, event: str) -> AbstractContextManager[None]:
        """Let ranks that do something else here see what this one does."""
        order = self._order()
        return nullcontext() if order is None else order.exchanges(event)

    def _order(self) -> SameBlocks | None:
        if self._world is None:
            return None
        return order_of(range(dist.get_world_size(self._world)))

    def _go_on(self) -> None:
        """Show to ranks that wait for this one in a hook that it has gone on, as to a batch."""
        if (order := self._order()) is not None:
            order.passes()
        if self._is_possible():
            follow_search(self._trainer, self._device)

    def exchange_nothing(self) -> None:
        """Take part in the exchange of a number of a step that this rank does not run."""
        self._exchange(torch.zeros((), device="cpu"), "", self._world)

    def _exchange(self, number: Tensor, name: str, group: Any) -> tuple[Tensor, ...]:
        """Return for each rank of `group` its number, the checksum of its name, and its samples."""
        bits = number.detach().to(self._device).reshape(1).view(torch.int32)
        mine = torch.zeros(1, 4, dtype=torch.int32, device=self._device)
        mine[0, : bits.numel()] = bits
        mine[0, 2] = _tag(name)
        mine[0, 3] = self._samples or 0
        all_of_them = self._gather(mine, name, group)
        values = all_of_them[:, : bits.numel()].contiguous().view(number.dtype).reshape(-1)
        return values, all_of_them[:, 2], all_of_them[:, 3]

    def _gather(self, mine: Tensor, name: str, group: Any) -> Tensor:
        """Return the rows of all ranks of a group, (ranks, 4), of which this one has its own."""
        all_of_them = mine.new_empty(dist.get_world_size(group), 4)
        place = next((place for place in (_END, _NEXT) if name.startswith(place)), None)
        event = f"logs {name!r}" if place is None else f"comes to {place}"
        with self.exchanges(event) if group is self._world else nullcontext():
            dist.all_gather_into_tensor(all_of_them, mine, group)
        return all_of_them

    def _refuse_other_names(self, name: str, tags: Tensor, group: Any) -> None:
        if len(set(tags.tolist())) > 1:
            names: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(names, name, group=group)
            raise DisagreementError(_other_names(names, dist.get_process_group_ranks(group)))

    def _compare_end(self, trainer: Trainer) -> None:
        """Compare what is still to be reduced, options of optimizers, weights, and steps."""
        if self._is_possible():
            names = "\n".join([_END, *not_reduced(trainer)])
            digest = digest_of_optimizers(trainer.optimizers)
            digests, tags, _ = self._exchange(digest, names, self._world)
            self._refuse_other_names(names, tags, self._world)
            refuse_other_optimizers(digests.tolist(), trainer.optimizers, self._world)
            for name, unread, group in self._unread:
                self._refuse_other_names(name, unread, group)
            self._unread.clear()
            module = trainer.lightning_module
            refuse_drifted_weights(module, self._device, self._replicas, self._world)
            self._compare_steps()  # a weight that one rank has changed would be another number

    def _compare_steps(self) -> None:
        if self._is_possible():
            with self.exchanges("compares its steps"):
                try:
                    self._steps.compare(self._device, self._replicas, self._world)
                except DisagreementError as error:
                    if self._steps.differences is None:
                        raise
                    self._steps.differences.append(str(error))

    def _is_possible(self) -> bool:
        several = dist.is_initialized() and dist.get_world_size(self._world) > 1
        return several and not self._peers.is_disconnected()

    # Values that decide.

    def _any_rank(self, *wishes: bool) -> list[bool]:
        """Return for each wish whether a rank has it; all ranks call this between two batches.

        Raises:
            DisagreementError: Another rank logs a value; all ranks raise.
        """
        if not self._is_possible():
            return [*wishes]
        bits = sum(wish << place for place, wish in enumerate(wishes))
        row = torch.tensor([[bits, 0, _tag(_NEXT), 0]], dtype=torch.int32, device=self._device)
        rows = self._gather(row, _NEXT, self._world).cpu()  # one wait for a device
        self._refuse_other_names(_NEXT, rows[:, 2], self._world)
        everywhere = functools.reduce(or_, rows[:, 0].tolist())
        return [bool(everywhere >> place & 1) for place in range(len(wishes))]

    def _agreed(self, value: Any, *, kind: str, name: str) -> Any:
        """Return the value of a number that ranks follow, the mean over replicas that differ.

        Raises:
            DisagreementError: Ranks that share samples have different values; all ranks raise.
        """
        found = self._agreed_values({name: value}, kind, name)
        return found.get(name, value)

    def _agreed_candidates(
        self, callback: ModelCheckpoint, candidates: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values that decide on a checkpoint and its name, alike on all ranks."""
        monitored = callback.monitor or ""
        return self._agreed_values(candidates, type(callback).__name__, monitored)

    def _agreed_values(
        self, values: Mapping[str, Any], kind: str, monitored: str
    ) -> dict[str, Any]:
        own = dict(values)
        if not self._is_possible():
            return own
        numbers = {name: _number(value) for name, value in own.items()}
        everywhere: list[Any] = [None] * dist.get_world_size(self._world)
        with self.exchanges(f"follows {monitored!r} in {kind}"):
            dist.all_gather_object(everywhere, numbers, group=self._world)
        seen = [each.get(monitored) for each in everywhere]
        if (pair := self._that_differ(seen)) is not None:
            one, other = pair
            raise DisagreementError(
                f"the ranks disagree on {monitored!r}, which {kind} follows: it is "
                f"{_shown(seen[one])} on rank {one} and {_shown(seen[other])} on rank {other}; "
                f"log it on all ranks, with sync_dist=True."
            )
        if monitored not in self._warned and any(not _same(seen[0], value) for value in seen):
            self._warned.add(monitored)
            rank_zero_warn(
                f"{kind} follows {monitored!r}, of which each data replica has its own value: the "
                "mean over the replicas decides. self.log(..., sync_dist=True) logs that mean, too."
            )
        decides = {**everywhere[0], monitored: _mean(seen)}  # others are in the names of files
        return {
            name: value
            if decides.get(name) is None
            else torch.full_like(value, decides[name])
            if isinstance(value, Tensor)
            else type(value)(decides[name])
            for name, value in own.items()
        }

    def _that_differ(self, seen: Sequence[float | None]) -> tuple[int, int] | None:
        """Return two ranks that must have one value and do not: of one replica, or one has none."""
        first: dict[int, int] = {}
        for rank, value in enumerate(seen):
            one = first.setdefault(self._replicas[rank], rank)
            if not _same(seen[one], value):
                return one, rank
            if (value is None) is not (seen[0] is None):
                return 0, rank
        return None


def _other_names(names: list[str], ranks: list[int]) -> str:
    """Word the first difference between the values that rank 0 and another rank reduce."""
    other = next(i for i, name in enumerate(names) if name != names[0])
    pairs = zip_longest(names[0].split("\n"), names[other].split("\n"), fillvalue=_END)
    first = next(pair for pair in pairs if pair[0] != pair[1])
    said = [
        f"rank {rank} comes to {name}" if name in (_END, _NEXT) else f"rank {rank} logs {name!r}"
        for rank, name in zip((ranks[0], ranks[other]), first, strict=True)
    ]
    return (
        f"the ranks do different things: {said[1]}, where {said[0]}; log the same names with "
        "sync_dist=True in the same order on all ranks."
    )


def _tag(name: str) -> int:
    """Return the checksum of a name, as an int32."""
    return zlib.crc32(name.encode()) - 2**31


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what ranks have; that of rank 0 where they have the same, or some none."""
    if None in values or all(_same(values[0], value) for value in values):
        return values[0]
    return sum(value for value in values if value is not None) / len(values)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_SAME) or (one != one and other != other)


def _shown(value: float | None) -> str:
    return "not logged" if value is None else f"{value:.6g}"
