"""Refuses a step in which ranks gather or reduce different blocks at the same place.

FSDP2 pairs the collectives of the ranks in the order in which each issues them. If one rank runs
another block than the others, or leaves one out, weights of one block are mixed with those of
another, or the process is aborted, or all wait for ever.

Ranks remember which block came after which way through the module, as all of them have agreed. A
block that comes as before costs no message. A rank that comes to another one says so in the store,
and waits until all ranks have come to it: they have changed their way alike. While it waits, a
thread of each rank answers how far it has come. A rank that has passed this place, or is about to
gather another block, shows that the ways differ.
"""

import atexit
import json
import time
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_shard.domain.subdomain import Domain
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.failures.failure import RankFailedError
from lightning_shard.processes.failures.failure_watch import check_ranks, is_of_processes
from lightning_shard.processes.failures.lone_waits import where_all_wait
from lightning_shard.processes.failures.store_thread import StoreThread
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import backward_pass, default_store

LOOK_S = 0.5  # between two looks at the other ranks
WAYS = 100_000  # that are remembered
STUCK_LOOKS = 30  # in which all other ranks wait, and none computes
LIMIT_S = 1800.0  # for a rank that neither comes nor passes

_OTHER_BLOCKS = (
    "run different blocks",
    "let all ranks run the same blocks in the same order: what a rank does not need it can run "
    "with a weight of 0 in the loss.",
)
_OTHER_CALLS = "do different things", "let all ranks do so in the same order."
_OTHER_LENGTHS = (
    "read different numbers of batches",
    "give all ranks as many: one batch_size, and data of one length; or end the loop on all ranks "
    "after the same number: for batch in itertools.islice(loader, number).",
)
_OTHER_HOOKS = (
    "do different things",
    "register a hook of a parameter on all ranks. What one rank alone looks at, as a logger does, "
    "it finds in p.grad in on_before_optimizer_step, which is the mean over the ranks; with wandb "
    'take logger.watch(module, log="parameters").',
)
_READ_ALL = "has read all of its batches"
LOOKED_AT = "gives hooks of a parameter the mean of its gradient"

_open: dict[tuple[int, ...], "SameBlocks"] = {}  # by ranks
PROCESS_STATE = {"_open": _open}


def same_blocks(group: dist.ProcessGroup) -> "SameBlocks | None":
    """Return the common order of blocks of the ranks of `group`, begun anew; all of them call it.

    Returns:
        None where there is one rank, or ranks are not processes with a store.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1 or not is_of_processes():
        return None
    found = _open.get(ranks)
    if found is None or found.group_store is not default_store():
        if found is not None:
            found.close()
        found = _open[ranks] = SameBlocks(ranks, dist.get_rank())
    found.begin()
    return found


def order_of(ranks: Sequence[int]) -> "SameBlocks | None":
    """Return the common order of `ranks` that `same_blocks` has begun; None where there is none."""
    found = _open.get(tuple(ranks))
    return found if found is not None and found.group_store is default_store() else None


def members_come_to(domain: Domain, event: str) -> None:
    """Compare an event of a step with what the other ranks of the domain do.

    Args:
        domain: The ranks that share each sample.
        event: A clause that names what this rank does.

    Raises:
        DisagreementError: Another rank does something else.
    """
    order = order_of(domain.ranks) or same_blocks(domain.group(tuple(range(domain.mesh.ndim))))
    if order is not None:
        order.comes_to(event)


def orders() -> list["SameBlocks"]:
    """Return all common orders of blocks in which this process takes part."""
    return [order for order in _open.values() if order.group_store is default_store()]


def has_come(store: Any, keys: list[str], wait_s: float) -> bool:
    """Wait for keys; return whether they have come. `store.wait` would print that they have not."""
    deadline = time.monotonic() + wait_s
    pause = 0.0002
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


class SameBlocks:
    """Compares the order in which ranks gather and reduce their blocks.

    Attributes:
        ranks: The ranks that shard the same modules, or all ranks.
        group_store: The store of their process group.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Begin without an order."""
        self.group_store = default_store()
        self.ranks, self._rank = ranks, rank
        self._store, self._answers = (store_of_attempt().clone() for _ in range(2))
        self._number = 0  # counts the modules that were sharded
        self._old: list[str] = []
        self.begin()
        self._thread = StoreThread(self._answer, every_s=LOOK_S)
        atexit.register(self.close)

    def begin(self) -> None:
        """Forget the order, since one more module has been sharded."""
        self._number += 1
        self._next: dict[Any, str] = {}  # the event that follows a way through the module
        self._way = 0, 0  # the events of the step before, and since this one began, as numbers
        self._first, self._in_backward = "", False
        self._count = 0
        self._status = 0, ""  # the count, and the event that is waited for; read by the thread
        self._prefix = f"blocks/{zlib.crc32(repr(self.ranks).encode())}/{self._number}"

    def comes_to(self, event: str, words: str = "", *, in_backward: bool = False) -> None:
        """Note that this rank is about to gather or reduce, and wait if that is new.

        Args:
            event: A clause that names what is gathered, such as "gathers 'encoder.0'".
            words: The clause in an error of this rank; by default the event itself.
            in_backward: True if it ends a backward pass that has made no gradient.

        Raises:
            DisagreementError: Another rank gathers or reduces another block.
            RankFailedError: A rank has ended, or failed, while this one waits for it.
        """
        backward = in_backward or backward_pass() != -1
        begins = not backward and (self._in_backward or event == self._first)
        if begins or not self._first:
            self._first, self._way = event, (self._way[1], 0)
        self._in_backward = backward
        if self._next.get(self._way) != event:
            self._agree(event, words or event)
            if len(self._next) > WAYS:
                self._next.clear()
            self._next[self._way] = event
        self._way = self._way[0], hash((self._way[1], backward, event))
        self._count += 1
        self._status = self._count, ""

    def ends_batches(self, number: int) -> None:
        """Come to the end of a pass over batches, of which this rank has read a number.

        Raises:
            DisagreementError: Another rank has a further batch.
            RankFailedError: A rank has ended, or failed, while this one waits for it.
        """
        self._agree(_READ_ALL, f"has read all of its {number} batches")
        self.passes()

    @property
    def count(self) -> int:
        """The number of places to which this rank has come with the others."""
        return self._count

    @contextmanager
    def exchanges(self, event: str) -> Generator[None]:
        """Let a rank that waits for something else see that this rank is in a collective.

        Args:
            event: A clause that names the collective, in which all ranks compare what they do.
        """
        self._status = self._count, event
        yield
        self._count += 1
        self._status = self._count, ""

    def passes(self) -> None:
        """Note that this rank begins what all ranks begin, such as a training step."""
        self._count += 1
        self._status = self._count, ""

    def leaves(self) -> None:
        """Note that this rank ends what it did with the others; it may not answer any more."""
        self.passes()
        self._store.set(f"{self._prefix}/at/{self._rank}", json.dumps(self._status))

    def gone_on(self, ranks: Sequence[int], event: str) -> str:
        """Word what one of these ranks does that is past this place; "" where none is known to be.

        They answer within `LOOK_S`, so it is asked again and again, until `asks_no_more`.
        """
        self._store.set(f"{self._prefix}/asked", "")
        return self._difference(event, [rank for rank in ranks if rank in self.ranks])

    def asks_no_more(self) -> None:
        """Let the ranks stop answering."""
        self._store.delete_key(f"{self._prefix}/asked")

    def close(self) -> None:
        """End the thread that answers."""
        atexit.unregister(self.close)
        self._thread.close()
        self._thread.join()

    def _agree(self, event: str, words: str) -> None:
        key = f"{self._prefix}/{self._count}/{zlib.crc32(event.encode())}"
        self._status, began = (self._count, event), time.monotonic()
        if self._store.add(key, 1) == len(self.ranks):
            self._store.set(f"{key}/all", "")
        of_blocks = event.startswith(("gathers", "reduces"))
        # sooner than a collective of the others gives up, which would not say what was wrong
        limit_s = LIMIT_S if of_blocks else self._store.timeout.total_seconds() / 2
        asked, stuck = False, 0
        while not has_come(self._store, [f"{key}/all"], LOOK_S):
            self._store.set(f"{self._prefix}/asked", "")  # each time: others take it away
            other = self._difference(event, self.ranks) if asked else ""
            try:
                check_ranks([rank for rank in self.ranks if rank != self._rank])
            except RankFailedError:  # a rank whose run has ended has said so
                other = other or self._difference(event, self.ranks)
                if not other and not self._store.check([f"{key}/all"]):
                    raise
            asked, stuck = True, stuck + 1 if (waits := self._waits(event)) else 0
            other = other or (waits if stuck > STUCK_LOOKS else "")
            if other and not self._store.check([f"{key}/all"]):
                kind, remedy = _OTHER_BLOCKS if of_blocks else _OTHER_CALLS
                if event == _READ_ALL or _READ_ALL in other:
                    kind, remedy = _OTHER_LENGTHS
                elif event == LOOKED_AT or LOOKED_AT in other:
                    kind, remedy = _OTHER_HOOKS
                raise DisagreementError(
                    f"the ranks {kind}: rank {self._rank} {words}, where {other}; {remedy}"
                )
            if time.monotonic() - began > limit_s:
                raise TimeoutError(
                    f"rank {self._rank} {words}, and for {limit_s:.0f} s not all ranks have come "
                    "to it; let all ranks do so in the same order."
                )
        self._status = self._count, ""
        if self._rank == self.ranks[0]:  # all have left the agreement before this one
            for old in self._old:
                self._store.delete_key(old)
            self._old = [key, f"{key}/all", *([f"{self._prefix}/asked"] if asked else [])]

    def _waits(self, event: str) -> str:
        """Word where a rank waits that has not come; "" where a rank of the group computes."""

        def has_come(rank: int) -> bool:
            at = f"{self._prefix}/at/{rank}"
            return self._store.check([at]) and json.loads(self._store.get(at))[1] == event

        others = [rank for rank in self.ranks if rank != self._rank]
        return where_all_wait(self._store, [rank for rank in others if not has_come(rank)])

    def _difference(self, event: str, ranks: Sequence[int]) -> str:
        """Word the block of another rank at this place; "" if none is known to be another one."""
        for rank in ranks:
            key = f"{self._prefix}/at/{rank}"
            if rank == self._rank or not self._store.check([key]):
                continue
            count, waits = json.loads(self._store.get(key))
            if count > self._count:
                expected = self._next.get(self._way)
                does = f"{expected}, as before" if expected else "has gone on"
                if event == _READ_ALL:
                    does = "has another one"
                return f"rank {rank} {does}"
            if count == self._count and waits not in ("", event):
                return f"rank {rank} {waits}"
        return ""

    def _answer(self) -> None:
        """Write how far this rank has come, while another one asks."""
        if self._answers.check([f"{self._prefix}/asked"]):
            status = json.dumps(self._status)
            self._answers.set(f"{self._prefix}/at/{self._rank}", status)


class NamedGather:
    """Gathers the parameters of a block after the ranks have come to it."""

    def __init__(self, plain: Any, order: SameBlocks, name: str) -> None:
        """Stand before `plain`, the collective that FSDP2 would use, of the block `name`."""
        self._plain, self._order, self._event = plain, order, f"gathers {name}"

    def allocate(self, *size: Any, **options: Any) -> Any:
        """Allocate memory for what is gathered, as FSDP2 does."""
        return self._plain.allocate(*size, **options)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        """Gather the parameters of one block over the ranks of `group`."""
        if group.size() > 1:
            self._order.comes_to(self._event)
        return self._plain(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
        )
