"""Moves what blocks keep for backward to the memory of the host, and fetches it ahead of backward.

Copies run on two streams beside the computation, one to the host and one back, so the process
never waits for them. One rule orders all memory. A tensor on the device is in memory of the stream
that computes; a copy waits for that stream before it touches the tensor, and that stream waits for
the copy before the tensor is let go. A tensor is fetched, and its memory on the host is another's,
only after it was let go.

Parameters stay, since FSDP2 frees and gathers them itself. What lies on the CPU stays, too.
"""

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.fsdp.mixins import mix_in
from lightning_shard.processes.torch_private.internals import base_of, version_of

# At 25 GB/s a smaller tensor travels in 3 us, less than it takes to queue its copy and the waits.
SMALL_BYTES = 2**16

# On the device beside what computes: forward waits for the oldest copy where more is on its way,
# and backward fetches as much ahead. At 25 GB/s it travels in 10 ms.
AHEAD_BYTES = 2**28


def is_moved(tensor: Tensor) -> bool:
    """Return True for a saved tensor that an offloaded block moves: an activation."""
    source = base_of(tensor)
    is_leaf = source.requires_grad and source.grad_fn is None
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.nbytes >= SMALL_BYTES
        and not is_leaf
        and not isinstance(source, nn.Parameter)  # a frozen one, which FSDP2 frees, too
        and not _is_expanded(tensor)  # a copy would be larger than its memory
    )


def _is_expanded(tensor: Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


class Driver:
    """The streams and memory of a device; a test puts a simulated one in its place."""

    def holds(self, tensor: Tensor) -> bool:
        """Return True for a tensor in memory of a device that is not the host's."""
        return tensor.device.type not in ("cpu", "meta")

    def current(self, device: torch.device) -> torch.Stream:
        """The stream that computes now."""
        return torch.accelerator.current_stream(device)

    def beside(self, device: torch.device, way: str) -> torch.Stream:
        """The stream of all copies from a device to the host ("out"), or of those "back"."""
        return _stream(device, way)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Memory like a tensor's, which copies to and from the device do not wait for."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def on_device(self, host: Tensor, device: torch.device) -> Tensor:
        """Memory of the current stream."""
        return torch.empty_like(host, device=device)

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Let nobody have the tensor's memory before the stream has done what it does by then."""
        tensor.record_stream(stream)


@functools.cache
def _stream(device: torch.device, way: str) -> torch.Stream:
    return torch.Stream(device)


class _Saved:
    """A saved tensor: on the host, and on the device, too, while it is near."""

    __slots__ = (
        "__weakref__", "copied", "device", "driver", "host", "near", "overwritten", "place",
        "stream", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, place: int, driver: Driver) -> None:
        """Start the copy to the host."""
        self.near, self.overwritten, self.place, self.driver = None, False, place, driver
        self.device, self.stream = tensor.device, driver.current(tensor.device)
        near = tensor.detach().resolve_conj().resolve_neg()  # it has no node, which would hold us
        self.host = driver.on_host(near)
        if self.host.stride() != near.stride():
            near = near.clone()  # here: the stream of the copies would copy into memory of its own
        self._copy(self.host, near, "out")

    def fetch(self) -> None:
        """Start the copy to the device, if it is not near."""
        if self.near is None:
            with self.stream:
                near = self.driver.on_device(self.host, self.device)
            self._copy(near, self.host, "back")

    def _copy(self, to: Tensor, source: Tensor, way: str) -> None:
        beside = self.driver.beside(self.device, way)
        beside.wait_stream(self.stream)
        with beside:
            to.copy_(source, non_blocking=True)
        self.copied = beside.record_event()
        self.near = source if way == "out" else to
        self.version = version_of(self.near)

    def take(self) -> Tensor:
        """The tensor for the current stream; it was fetched."""
        near, current = self.near, self.driver.current(self.device)
        self.let_go()
        assert near is not None
        if self.overwritten:
            raise RuntimeError(
                f"a tensor {tuple(near.shape)} that backward needs was written in place, or its "
                "memory was freed, after an offloaded block had saved it; leave it as it is until "
                "backward, or take the block out of activation_offload."
            )
        if current != self.stream:
            current.wait_event(self.copied)
            self.driver.record_stream(near, current)
        return near

    def let_go(self) -> None:
        """Leave it to the host; the memory on the device goes back once the copy is done."""
        if self.near is not None:
            self.stream.wait_event(self.copied)
            is_there = self.near.untyped_storage().nbytes() > 0
            self.overwritten |= version_of(self.near) != self.version or not is_there
            self.near = None

    __del__ = let_go  # a graph that is dropped, where a copy may be on its way


class Mover:
    """Moves tensors as autograd saves them, and back in the reverse order."""

    def __init__(self, driver: Driver) -> None:
        """Nothing is moved yet."""
        self.driver = driver
        self._order: list[weakref.ref[_Saved]] = []  # of saving; autograd's graph holds them
        self._last = 0  # the place that backward asked for last
        self._passed = 0  # backward has left the places above
        self._lock = threading.Lock()  # backward may run in threads of its own

    def pack(self, tensor: Tensor) -> Any:
        """Hook of autograd: what it keeps in the place of a tensor."""
        if not (self.driver.holds(tensor) and is_moved(tensor)):
            return tensor
        with self._lock:
            self._forget()
            saved = _Saved(tensor, len(self._order), self.driver)
            self._order.append(weakref.ref(saved))
            self._last = self._passed = len(self._order)
            room = AHEAD_BYTES
            for older in self._held(range(saved.place, -1, -1)):
                if older.near is None:
                    break
                if room <= 0:
                    older.let_go()
                room -= older.host.nbytes
        return saved

    def unpack(self, packed: Any) -> Tensor:
        """Hook of autograd: the tensor, for the current stream."""
        if not isinstance(packed, _Saved):
            return packed
        with self._lock:
            self._forget()
            is_next = packed.place < self._last  # node of the graph; those of one node come upwards
            if is_next:
                self._leave()
            self._last, self._passed = packed.place, max(self._passed, packed.place)
            packed.fetch()
            tensor = packed.take()
            room = AHEAD_BYTES if is_next else 0
            for older in self._held(range(packed.place - 1, -1, -1)):
                if room <= 0:
                    break
                older.fetch()
                room -= older.host.nbytes
        return tensor

    def _leave(self) -> None:
        """Let go what was fetched and not asked for, as of an output that the loss leaves out."""
        for newer in self._held(range(self._last + 1, self._passed + 1)):
            newer.let_go()
        self._passed = self._last

    def _forget(self) -> None:
        while self._order and self._order[-1]() is None:
            self._order.pop()

    def _held(self, places: range) -> Iterator[_Saved]:
        """Give the saved tensors that a graph still holds."""
        for place in places:
            if place < len(self._order) and (saved := self._order[place]()) is not None:
                yield saved


MOVER = Mover(Driver())  # of this process


class OnHost(saved_tensors_hooks):
    """While open, what autograd saves lies in the host's memory until backward needs it."""

    def __init__(self) -> None:
        """Store with the `Mover` of this process."""
        super().__init__(MOVER.pack, MOVER.unpack)


class _Offloaded:
    """Mixin of a module whose activations lie on the host from forward to backward."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing to register: the class stands for its base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, whose saved tensors go to the host."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with OnHost():
            return run(*args, **kwargs)


def offload(modules: Iterable[nn.Module]) -> None:
    """Keep the activations of these modules on the host."""
    for module in modules:
        mix_in(module, _Offloaded)
