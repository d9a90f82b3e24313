"""Moves storages of a device to other memory and back; their tensors stay where they are.

A storage that is away has no bytes (`resize_(0)`): frames of Python, views and autograd's graph
keep their tensors, which must not be read before it is back. One that was not written since its
copy is freed without another one.

Copies run on two streams beside the computation, one to the host and one back. One rule orders all
memory. A storage is in memory of the stream that computes; a copy waits for that stream before it
touches the storage, and that stream waits for the copy before it reads the storage or frees it.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_shard.memory.paging.host_memory import Memory, Room
from lightning_shard.processes.torch_private.internals import key_of_storage


class Driver:
    """The streams and memory of a device; a test puts a simulated one in its place."""

    def holds(self, tensor: Tensor) -> bool:
        """Return True for a tensor in memory of a device that is not the host's."""
        return type(tensor) is Tensor and tensor.device.type not in ("cpu", "meta")

    def current(self, device: torch.device) -> Any:
        """Return the stream that computes now."""
        return _INLINE if device.type == "cpu" else torch.accelerator.current_stream(device)

    def beside(self, device: torch.device, way: str) -> Any:
        """Return the stream of all copies from a device to the host ("out"), or of those "back"."""
        return _INLINE if device.type == "cpu" else _stream(device, way)

    def flat(self, storage: UntypedStorage) -> Tensor:
        """Return all bytes of a storage, (n,) in uint8."""
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def parts(self, storage: UntypedStorage, sizes: list[int]) -> Sequence[Tensor]:
        """Return the bytes of a storage, so many in each part."""
        return self.flat(storage).split(sizes)

    def room(self, memory: Memory, count: int) -> Room:
        """Return room for so many bytes outside of the device."""
        return memory.take(count)

    def copy(self, to: Tensor, source: Tensor, way: str) -> None:
        """Start a copy on the current stream, that of its way."""
        to.copy_(source, non_blocking=True)

    def free(self, storage: UntypedStorage) -> None:
        """Leave the storage without bytes."""
        storage.resize_(0)

    def allocate(self, storage: UntypedStorage, count: int) -> None:
        """Give a storage bytes again, in memory of the current stream."""
        storage.resize_(count)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Let nobody have the tensor's memory before the stream has done what it does by then."""
        tensor.record_stream(stream)


class _Inline:
    """The stream of a CPU: what is asked of it is done at once."""

    def __enter__(self) -> "_Inline":
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> "_Inline":
        return self

    def synchronize(self) -> None: ...


_INLINE = _Inline()


@functools.cache
def _stream(device: torch.device, way: str) -> torch.Stream:
    return torch.Stream(device)


class Page:
    """A storage of the device, which may be away.

    Attributes:
        count: Its bytes.
        host: Where its copy lies, if that holds the same numbers.
        is_away: True while it has no bytes on the device.
        is_leaving: True from the start of a copy to the host until it is freed.
        stays: True for one that is never sent away.
        pins: The number of operators that run with it.
        used: When it was used last, on the pager's clock.
        place: When it was used last before it was put in order of leaving.
        held: The number of saved tensors that have it.
        again: A tensor in other memory with its numbers, which was made in its place.
    """

    __slots__ = (
        "__weakref__", "again", "copied", "count", "held", "host", "is_away", "is_leaving", "key",
        "pins", "place", "stays", "storage", "stream", "used", "waits", "way",
    )  # fmt: skip

    def __init__(self, key: int, count: int) -> None:
        """Begin on the device, without a copy."""
        self.key, self.count = key, count
        self.storage: weakref.ref[UntypedStorage]
        self.host: Room | None = None
        self.again: Tensor | None = None
        self.copied: Any = None  # the event of the last copy
        self.way = ""  # the way of that copy: "out" or "back"
        self.waits = False  # whether the stream that computes has still to wait for it
        self.is_away = self.is_leaving = self.stays = False
        self.stream: Any = None  # the stream to which its memory belongs
        self.pins = self.used = self.held = self.place = 0

    def memory(self) -> UntypedStorage:
        """Return the storage with its numbers."""
        storage = self.storage() if self.again is None else self.again.untyped_storage()
        assert storage is not None
        return storage


class Pages:
    """Table of the storages of a device that are known, by their addresses.

    Args:
        device: Where they are.
        memory: Where those lie that are away.
        driver: Streams and memory of the device.

    Attributes:
        near: Bytes of known storages on the device.
        out: Bytes that were copied to the host.
        back: Bytes that were copied back.
    """

    def __init__(self, device: torch.device, memory: Memory, driver: Driver) -> None:
        """Know no storage."""
        self.device, self.memory, self.driver = device, memory, driver
        self.near = self.out = self.back = 0
        self.known: dict[int, Page] = {}

    def note(self, storage: UntypedStorage) -> Page:
        """Know a storage from now on, until it dies."""
        key = key_of_storage(storage)
        page = self.known[key] = Page(key, storage.nbytes())
        page.storage = weakref.ref(storage, functools.partial(self._ended, page))
        page.stream = self.driver.current(self.device)
        self.near += page.count
        return page

    def send(self, page: Page) -> None:
        """Start the copy to the host, unless the host has the same numbers."""
        if page.host is None:
            page.host = self.driver.room(self.memory, page.count)
            self._copy(page, page.memory(), "out")
            self.out += page.count

    def free(self, page: Page) -> None:
        """Free its memory; the stream that computes waits until a copy is done."""
        self._wait(page)
        if page.again is not None:
            page.again = None
        else:
            self.driver.free(page.memory())
        page.is_away, page.is_leaving = True, False
        self.near -= page.count

    def fetch(self, page: Page) -> None:
        """Start the copy to the device."""
        storage = page.memory()
        assert page.host is not None
        page.stream = self.driver.current(self.device)
        self.driver.allocate(storage, page.count)
        # anew, so that we hear of its end before whoever owns the new memory does
        page.storage = weakref.ref(storage, functools.partial(self._ended, page))
        page.is_away = False
        self.near += page.count
        self._copy(page, storage, "back")
        self.back += page.count

    def replace(self, page: Page, again: Tensor) -> None:
        """Take the numbers of a storage that is away from a tensor that computes on this stream."""
        page.again, page.stream = again, self.driver.current(self.device)
        page.copied, page.way = page.stream.record_event(), "back"
        page.is_away = False
        self.near += page.count

    def take(self, page: Page) -> None:
        """Let the current stream read it: it waits for a copy that is on its way."""
        current = self.driver.current(self.device)
        if current != page.stream:
            if page.way == "back":
                current.wait_event(page.copied)
            self.driver.record_stream(self.driver.flat(page.memory()), current)
        elif page.way == "back":
            self._wait(page)

    def forget_copy(self, page: Page) -> None:
        """Note that the storage was written, so that the host's numbers are old."""
        if page.waits:
            self._wait(page)
        page.host, page.is_leaving = None, False

    def _copy(self, page: Page, storage: UntypedStorage, way: str) -> None:
        assert page.host is not None
        hosted = page.host.parts
        own = self.driver.parts(storage, [len(part) for part in hosted])
        to, source = (hosted, own) if way == "out" else (own, hosted)
        if self.memory.waits:  # a file is mapped, and not pinned
            with page.stream:
                to[0].copy_(source[0])
            return
        beside = self.driver.beside(self.device, way)
        beside.wait_stream(page.stream)
        with beside:
            for part, read in zip(to, source, strict=True):
                self.driver.copy(part, read, way)
        page.copied, page.way, page.waits = beside.record_event(), way, True

    def _wait(self, page: Page) -> None:
        if page.waits:
            page.stream.wait_event(page.copied)
            page.waits = False

    def forget(self, page: Page) -> None:
        """Know the storage no more; its owner has it as it is."""
        self._ended(page)

    def _ended(self, page: Page, _: Any = None) -> None:
        """Forget a storage whose last tensor has gone; its memory is the next one's."""
        if self.known.get(page.key) is not page:
            return
        self._wait(page)
        if not page.is_away:
            self.near -= page.count
        page.host = page.again = None
        del self.known[page.key]
