"""Keeps what a device holds within a budget: storages that are not needed now lie elsewhere.

A `Pager` knows each storage that an operator makes while one of its modes is open, brings those
that an operator reads, and makes room before an operator allocates. Storages of which the host
still has a copy leave first, since that costs nothing. Among the others that is the one that nobody
has used for the longest time.
"""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_shard.memory.paging.host_memory import Memory, MemoryInParts
from lightning_shard.memory.paging.mode import Exits, Paging
from lightning_shard.memory.paging.pages import Driver, Page, Pages
from lightning_shard.memory.paging.sleep import Sleep
from lightning_shard.processes.torch_private.internals import (
    key_of_storage,
    tree_map_only,
    version_of,
    with_keys,
    without_modes,
)

SMALL_BYTES = 2**14  # a smaller storage stays: it costs more to move than to keep
ASK_AGAIN = 32  # operations after which a pager asks again what of the unseen is still there
MEETING_SHARE = 1 / 8  # share of the budget; ranks whose tensors take less exchange on the device


class Pager:
    """The storages of one device that a program makes.

    Args:
        device: Where they are made; "cpu" is one, too, if `memory` lies in files.
        budget: Bytes that they may have on the device, beside what was there before. 0: as many as
            the largest operator so far has needed. None: nothing leaves by itself.
        memory: Where those lie that are away; the host's memory by default.
        small: Bytes below which a storage is never moved.
        driver: The streams and memory of the device.
        sleep: Tells for how long nothing is to be seen; None: it sees from the beginning.

    Attributes:
        operators: The number of operators that were seen.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None = None,
        memory: Memory | None = None,
        *,
        small: int = SMALL_BYTES,
        driver: Driver | None = None,
        sleep: Sleep | None = None,
    ) -> None:
        """Know no storage yet."""
        self.device, self.budget, self.small = with_index(device), budget, small
        self._grows = budget == 0
        memory = memory or MemoryInParts(pinned=self.device.type != "cpu")
        self.pages = Pages(self.device, memory, driver or Driver())
        self.operators, self._sleep = 0, sleep
        self._slept: Sleep | None = None  # after it has woken up
        self._unseen = self._awake = 0  # bytes that it has not seen made, and calls since
        self._clock = self._open = 0
        self._leaving: deque[Page] = deque()
        self._order: list[Page] = []  # who leaves next, the last one first
        self._made: dict[Any, int] = {}  # bytes that an operator made when it ran last
        self._lock = threading.RLock()

    # ---- what callers do

    @contextmanager
    def paging(self) -> Generator[None]:
        """See the operators of this thread while this is open.

        As the last thread closes it, what still lives comes back to the device, where anybody may
        read it.
        """
        self._open += 1
        try:
            with self._modes():
                yield
        finally:
            self._open -= 1
            if not self._open:
                self._bring_all()

    def seeing(self, reads: int = 0) -> AbstractContextManager[None]:
        """See the operators of this thread while this is open; nothing comes back at its end.

        Args:
            reads: The bytes of what will be read, for a pager that sleeps until it is too much.
        """
        return nullcontext() if self._sleeps(reads) else self._modes()

    @property
    def sleeps(self) -> bool:
        """True while all tensors stay where they are."""
        return self._sleep is not None

    def note_made(self, count: int) -> None:
        """Note the bytes of what an operation has made for all ranks, seen or not."""
        if self._sleep is not None:
            self._sleep.note(count)

    def close(self) -> None:
        """Bring back to the device all that lives, where anybody may read it."""
        self._bring_all()

    def bring(self, *tensors: Tensor) -> None:
        """Bring tensors for code that runs no operators of torch; they may leave afterwards."""
        with self._lock, without_modes():
            for tensor in tensors:
                page = self._page(tensor)
                if page is not None:
                    self._use(page)

    def stay(self, *tensors: Tensor) -> None:
        """Bring tensors, and never send them away again: others keep their addresses."""
        if self._sleep is not None:
            return  # a tensor that nobody knows stays
        with self._lock, without_modes():
            for tensor in tensors:
                page = self._page(tensor)
                if page is None and tensor.device == self.device and tensor.numel():
                    page = self.pages.note(tensor.untyped_storage())
                if page is not None and not page.stays:
                    self._use(page)
                    page.stays = True
                    self.pages.near -= page.count  # it counts as what was there before
                    page.count = 0

    @contextmanager
    def on_host(self, values: Any) -> Generator[Any]:
        """Give tensors of the device as tensors of the host, to be read and written there.

        What is known leaves the device, and its tensor on the host is its memory from then on.
        Others are copied, and copied back if they were written. Within a budget, tensors that take
        little of it are given as they are, on the device.

        Args:
            values: Tensors in lists, tuples and dicts.
        """
        if self._sleep is not None:
            yield values
            return
        copies: list[tuple[Tensor, Tensor]] = []

        def move(tensor: Tensor) -> Tensor:
            if tensor.device != self.device:
                return tensor
            page = self._page(tensor)
            if page is not None and not page.stays and page.count:
                return self._hosted(page, tensor)
            if self.device.type == "cpu":
                return tensor
            copies.append((tensor, tensor.cpu()))
            return copies[-1][1]

        # functional collectives bring tensors inside of an operator
        with self._lock, without_modes(), with_keys("ADInplaceOrView"):
            few = self._few(values)
            if few:
                with self._near(few):
                    yield values
                return
            moved = tree_map_only(Tensor, move, values)
            versions = [version_of(copy) for _, copy in copies]
            yield moved
            for (tensor, copy), version in zip(copies, versions, strict=True):
                if copy.is_inference() or version_of(copy) != version:  # nobody counts its writes
                    tensor.copy_(copy)

    # ---- what the modes tell

    def begin(self, given: list[Page], written: list[Page], key: Any) -> None:
        """Bring what an operator reads, pin it, and make room for what it makes."""
        with self._lock:
            self.operators += 1
            self._clock += 1
            for page in given:
                page.pins += 1
            expected = 0
            if key is not None:
                guess = self._made.get(key)
                expected = max((p.count for p in given), default=0) if guess is None else guess
                if self._grows:
                    assert self.budget is not None
                    self.budget = max(self.budget, sum(p.count for p in {*given}) + expected)
                expected += sum(page.count for page in {*given} if page.is_away)
                self._make_room(expected)
            for page in given:
                self._use(page)
            for page in written:
                self.pages.forget_copy(page)

    def end(self, made: list[Page], key: Any, given: list[Page]) -> None:
        """Know what an operator has made; make room where it was more than expected."""
        with self._lock:
            for page in made:
                page.used = self._clock
            if key is not None:
                self._made[key] = sum(page.count for page in made)
                for page in (both := [*given, *made]):
                    page.pins += 1
                self._make_room(0)
                for page in both:
                    page.pins -= 1

    def send_all(self) -> bool:
        """Free all that no operator runs with; return False if there was nothing."""
        with self._lock:
            before = self.pages.near
            self._free_leaving()
            for page in [*self.pages.known.values()]:
                if self._may_leave(page):
                    self._send(page)
            self._free_leaving()
            return self.pages.near < before

    # ---- how it is done

    @contextmanager
    def _modes(self) -> Generator[None]:
        with Exits(self), Paging(self):
            yield

    def _sleeps(self, reads: int) -> bool:
        if self._sleep is not None and self._sleep.is_over(reads):
            self._slept, self._sleep = self._sleep, None
            self._unseen = self._slept.held()
        elif self._slept is not None and self._unseen:
            self._awake += 1
            if self._awake % ASK_AGAIN == 0:
                self._unseen = max(min(self._unseen, self._slept.held() - self.pages.near), 0)
        return self._sleep is not None

    def _few(self, values: Any) -> set[Page]:
        """Return the storages of tensors, if all together take little of the budget."""
        pages = set[Page]()

        def find(tensor: Tensor) -> Tensor:
            page = self._page(tensor)
            if page is not None:
                pages.add(page)
            return tensor

        if self.budget is not None:
            tree_map_only(Tensor, find, values)
            if sum(page.count for page in pages) > self.budget * MEETING_SHARE:
                pages.clear()
        return pages

    @contextmanager
    def _near(self, pages: set[Page]) -> Generator[None]:
        """Keep storages on the device, where they may be written, while this is open."""
        for page in pages:
            page.pins += 1
        self._make_room(sum(page.count for page in pages if page.is_away))
        for page in pages:
            self._use(page)
            self.pages.forget_copy(page)
        try:
            yield
        finally:
            for page in pages:
                page.pins -= 1

    def _bring_all(self) -> None:
        with self._lock, without_modes():
            self._leaving.clear()
            self._order.clear()
            for page in [*self.pages.known.values()]:
                self._use(page)

    def _page(self, tensor: Tensor) -> Page | None:
        try:
            return self.pages.known.get(key_of_storage(tensor.untyped_storage()))
        except NotImplementedError:  # a sparse one has no storage
            return None

    def _use(self, page: Page) -> None:
        page.used = self._clock
        if page.is_away:
            storage = page.storage()
            assert storage is not None
            if storage.nbytes():  # its owner has given it bytes
                page.is_away, page.host, page.count = False, None, storage.nbytes()
                self.pages.near += page.count
            elif page.host is not None:
                self.pages.fetch(page)
        page.is_leaving = False
        if page.waits or self.device.type != "cpu":
            self.pages.take(page)

    def _send(self, page: Page) -> None:
        """Start to leave, in the order of `_leaving`."""
        storage = page.storage()
        if storage is None or page.stays:
            return
        if storage.nbytes() != page.count:  # its owner has freed it, or resized it
            self.pages.near += storage.nbytes() - page.count
            page.host, page.count = None, storage.nbytes()
        if page.count:
            self.pages.send(page)
            page.is_leaving = True
            self._leaving.append(page)

    def _free_leaving(self) -> None:
        """Free what is leaving."""
        while self._leaving:
            page = self._leaving.popleft()
            if page.is_leaving and page.storage() is not None and not page.pins:
                self.pages.free(page)

    def _may_leave(self, page: Page) -> bool:
        return not (page.is_away or page.is_leaving or page.pins or page.stays)

    def _make_room(self, count: int) -> None:
        """Let leave what is needed last, until so many bytes fit."""
        assert self.budget is not None
        if self.pages.near + count > self.budget - self._unseen:
            with without_modes():  # such as that of fake tensors, by which DTensor finds shapes
                self._send_until_fits(count)

    def _send_until_fits(self, count: int) -> None:
        assert self.budget is not None
        pages = self.pages
        self._free_leaving()
        is_new = False
        while pages.near + count > self.budget - self._unseen:
            if not self._order:
                if is_new:
                    return
                self._order, is_new = self._last_needed_last(), True
                if not self._order:
                    return
            page = self._order.pop()
            # a page used since it was put in order has its place in the next one
            if self._may_leave(page) and page.storage() is not None and (
                is_new or page.used == page.place
            ):  # fmt: skip
                self._send(page)
                self._free_leaving()

    def _last_needed_last(self) -> list[Page]:
        """Order what is near: by its last use, the newest first, and after that what has a copy.

        Backward needs the oldest last, and what came back for it no more.
        """
        near = [page for page in self.pages.known.values() if self._may_leave(page) and page.count]
        for page in near:
            page.place = page.used
        return sorted(near, key=lambda page: (page.host is None, page.used), reverse=True)

    def _hosted(self, page: Page, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the page's own memory there."""
        if not page.is_away:
            self._send(page)
            if page.is_leaving:
                self._leaving.remove(page)
                self.pages.free(page)
        assert page.host is not None
        if page.copied is not None:
            page.copied.synchronize()
        if len(page.host.parts) > 1:
            page.host = page.host.joined()
        held = page.host.bytes
        start = held.storage_offset() // tensor.element_size()
        return torch.empty(0, dtype=tensor.dtype, device=held.device).set_(
            held.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def with_index(device: torch.device) -> torch.device:
    """Return the device as tensors name it, with its number."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
