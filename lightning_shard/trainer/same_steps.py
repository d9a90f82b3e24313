"""Finds steps in which ranks of one domain compute different things.

Ranks that share samples run the same program, each on its rows. A step that one rank alone scales,
or whose loss it changes, still has one mean gradient: all ranks train the same, wrong network.
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.data.same_batch import digest_of
from lightning_shard.lightning import Callback, LightningModule, Trainer
from lightning_shard.ops.registry import name_of
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.failures.failure_watch import is_of_processes
from lightning_shard.processes.failures.lone_waits import compare_order
from lightning_shard.tensor.calls import ONLY_LOOK, RELATIVE, Calls, alike, counted_calls
from lightning_shard.tensor.tensor import DomainTensor


class _Use(NamedTuple):
    """The calls of one function: how often, with which numbers, and with results of which calls."""

    times: int
    values: list[Any]
    makers: list[str]


_Called = dict[str, _Use]
_NEVER = _Use(0, [], [])  # a function that was not called


class SameSteps:
    """Remembers what the steps of this rank have computed since they were last compared.

    Attributes:
        differences: Sentences that tell them, in a run that goes on to see how far its numbers are
            wrong; None in one that a difference ends.
    """

    def __init__(self) -> None:
        """Begin without ranks that share samples."""
        self.differences: list[str] | None = None
        self._calls = Calls()
        self._losses: Tensor | None = None
        self._read = 0  # a checksum of the batches
        self._is_shared = False

    def begin(self, ranks: Sequence[int]) -> None:
        """Begin a stage; steps that an exception ended before are forgotten.

        Args:
            ranks: The ranks that share samples, among them this one; no other is compared.
        """
        self._calls.clear()
        self._calls.reads_numbers = True
        self._read = 0
        self._losses, self._is_shared = None, len(ranks) > 1 and is_of_processes()
        if self._is_shared:
            compare_order(ranks, self._calls.latest)

    def note_batch(self, batch: Any) -> None:
        """Note what this rank has read, before it is moved to its device."""
        if self._is_shared:
            self._read = digest_of(batch, self._read)

    @contextmanager
    def one_step(self) -> Generator[None]:
        """Note the functions that are called with split tensors inside."""
        token = counted_calls.set(self._calls if self._is_shared else None)
        try:
            yield
        finally:
            counted_calls.reset(token)
            self._calls.reads_numbers = False

    @contextmanager
    def one_backward(self, loss: Tensor) -> Generator[None]:
        """Add a loss, of which gradients are computed inside; there nothing is counted.

        What is computed again then goes by the memory of the rank.
        """
        if self._is_shared and loss.numel() == 1 and not isinstance(loss, DomainTensor):
            size = loss.detach().abs().float().reshape(())
            self._losses = size if self._losses is None else self._losses + size
        token = counted_calls.set(None)
        try:
            yield
        finally:
            counted_calls.reset(token)

    def compare(self, device: torch.device, replicas: Sequence[int], group: Any) -> None:
        """Compare the steps since the last call; all ranks of the group must call this.

        Args:
            device: The device of this rank's collectives.
            replicas: The data replica of each rank of the group.
            group: All ranks, or those that share samples.

        Raises:
            DisagreementError: Ranks that share samples have called other functions, have given
                them other numbers, or have other losses; all ranks raise.
        """
        if not self._is_shared:
            return
        losses, self._losses = self._losses, None
        called = self._called()
        read, self._read = self._read, 0
        self._calls.clear()
        self._calls.reads_numbers = True
        ranks = dist.get_process_group_ranks(group)
        sums, digests = _of_all_ranks(losses, (read, sorted(called.items())), device, group)
        firsts = [replicas.index(replica) for replica in replicas]
        if any(digests[place] != digests[first] for place, first in enumerate(firsts)):
            everywhere: list[Any] = [None] * len(replicas)
            dist.all_gather_object(everywhere, (read, called), group)
            _refuse_other_batches([found for found, _ in everywhere], firsts, ranks)
            everywhere = [found for _, found in everywhere]
            _refuse_other_calls(everywhere, firsts, ranks)
            _refuse_other_numbers(everywhere, firsts, ranks)
            _refuse_other_tensors(everywhere, firsts, ranks)
        _refuse_other_losses(sums, firsts, ranks)

    def _called(self) -> _Called:
        """Return for each name of a function the number of its calls, and what it was given."""
        given, makers, called = self._calls.given(), self._calls.makers(), _Called()
        for function, count in self._calls.counts.items():
            if function not in ONLY_LOOK:
                before, values, of = called.get(name := name_of(function), _NEVER)
                called[name] = _Use(before + count, values + given[function], of + makers[function])
        return called


def _of_all_ranks(
    losses: Tensor | None, noted: Any, device: torch.device, group: Any
) -> tuple[Tensor, list[float]]:
    """Gather the sum of losses of each rank of the group, and a digest of what it has noted."""
    own = torch.zeros(2, device=device)
    if losses is not None:
        own[0] = losses
    own[1] = zlib.crc32(repr(noted).encode()) >> 8  # a float32 holds 24 bits
    gathered = own.new_empty(2 * dist.get_world_size(group))
    dist.all_gather_into_tensor(gathered, own, group)
    sums, digests = gathered.view(-1, 2).cpu().unbind(1)
    return sums, digests.tolist()


class WhenRanksCompare(Callback):
    """Compares as epochs end, before other callbacks read what was logged; and the first step."""

    def __init__(
        self, compare: Callable[[Trainer], None], compare_steps: Callable[[], None]
    ) -> None:
        """Begin before the first step.

        Args:
            compare: Compares all as an epoch ends.
            compare_steps: Compares the steps alone.
        """
        self._compare, self._compare_steps = compare, compare_steps
        self._is_first = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a run, of which the first step is compared."""
        self._is_first = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the first step: an epoch may last for hours."""
        if self._is_first:
            self._compare_steps()
        self._is_first = False

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what hooks have done before."""
        self._compare(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the steps, and what is logged."""
        self._compare(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what hooks have done since the last epoch."""
        self._compare(trainer)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what is logged."""
        self._compare(trainer)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare what is logged."""
        self._compare(trainer)

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the steps: predictions are compared with nothing else."""
        self._compare_steps()


_REASON = (
    "Ranks that share samples must compute the same function, each on its rows; otherwise their "
    "mean gradient belongs to no network. Let no rank number, clock or host name decide in a step. "
    "Draw random numbers by torch.rand, random or numpy.random, which these ranks share, or seed "
    "generators of your own alike."
)

_OTHERS = "other numbers, or other values of plain tensors,", ""
_IN_ANOTHER_ORDER = (
    "its numbers and tensors in another order",
    "A set of names has another order in each process, so sort it. ",
)


def _refuse_other_batches(read: Sequence[int], firsts: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise of the first rank that has read other batches than the first rank of its replica."""
    for place, first in enumerate(firsts):
        if read[place] != read[first]:
            raise DisagreementError(
                f"rank {ranks[place]} has read other batches than rank {ranks[first]}, with which "
                "it shares its samples, though the first batch of the epoch was the same. Let "
                "datasets, samplers and workers yield the same samples in the same order on both: "
                "seed their generators alike, and let no clock or rank decide."
            )


def _uses(
    called: Sequence[_Called], firsts: Sequence[int]
) -> Iterator[tuple[int, int, str, _Use, _Use]]:
    """Yield each rank, the first one of its replica, a function, and what both made of it."""
    for place, first in enumerate(firsts):
        for name in sorted(called[place] | called[first]):
            here, there = (called[rank].get(name, _NEVER) for rank in (place, first))
            yield place, first, name, here, there


def _refuse_other_calls(
    called: Sequence[_Called], firsts: Sequence[int], ranks: Sequence[int]
) -> None:
    """Raise of the first function that ranks of one replica have called in other numbers."""
    for place, first, name, here, there in _uses(called, firsts):
        if here.times != there.times:
            raise DisagreementError(
                f"the ranks have computed different steps: rank {ranks[first]} has called "
                f"{name} on split tensors {there.times} times, and rank {ranks[place]} "
                f"{here.times} times. {_REASON}"
            )


def _refuse_other_numbers(
    called: Sequence[_Called], firsts: Sequence[int], ranks: Sequence[int]
) -> None:
    """Raise of the first function to which ranks of one replica have given other numbers."""
    for place, first, name, here, there in _uses(called, firsts):
        if alike(here.values, there.values):
            continue
        reordered = alike(*(sorted(use.values, key=repr) for use in (here, there)))
        given, hint = _IN_ANOTHER_ORDER if reordered else _OTHERS
        raise DisagreementError(
            f"the ranks have computed different steps: rank {ranks[place]} has given {name} "
            f"{given} than rank {ranks[first]}, with which it shares its samples. "
            f"{hint}{_REASON}"
        )


def _refuse_other_tensors(
    called: Sequence[_Called], firsts: Sequence[int], ranks: Sequence[int]
) -> None:
    """Raise of the first function to which ranks of one replica have given other split tensors."""
    for place, first, name, here, there in _uses(called, firsts):
        pairs = zip_longest(here.makers, there.makers, fillvalue="a tensor of no call")
        if other := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise DisagreementError(
                f"the ranks have computed different steps: rank {ranks[place]} has given "
                f"{name} another split tensor than rank {ranks[first]}, with which it shares "
                f"its samples: {other[0]}, and {other[1]}. {_REASON}"
            )


def _refuse_other_losses(sums: Tensor, firsts: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise of the first rank whose losses are not those of the first rank of its replica."""
    wanted = sums[[*firsts]]
    is_equal = torch.isclose(sums, wanted, rtol=RELATIVE, atol=0.0, equal_nan=True)
    for place in (~is_equal).nonzero().flatten().tolist():
        raise DisagreementError(
            f"the losses of these steps differ: they add up to {wanted[place]:.6g} on rank "
            f"{ranks[firsts[place]]} and to {sums[place]:.6g} on rank {ranks[place]}, which share "
            f"their samples. {_REASON}"
        )
