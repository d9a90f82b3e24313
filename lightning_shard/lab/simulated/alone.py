"""A process group of which one rank runs alone; each collective gives it what it brings itself.

So the rank computes, holds and sends what it would among the others, on other numbers: from a peer
it gets its own rows where they have the same size, and zeros where they have not.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_shard.lab.simulated.collectives import put
from lightning_shard.lab.simulated.group import Handle, OpenCollectives, SimulatedGroup
from lightning_shard.trainer.profile.traffic import sent_bytes


class Listener(Protocol):
    """Follows the collectives of a rank that runs alone."""

    def begins(self, name: str, members: tuple[int, ...], sent: int) -> int:
        """Note that a collective begins, in which the rank sends so many bytes; number it."""
        ...

    def is_under_way(self) -> None:
        """Note that the call which began the collective returns."""
        ...

    def waits(self, number: int) -> None:
        """Note that the rank needs what the collective gives."""
        ...


class _Work(Handle):
    """A collective that has ended when it begins."""

    def __init__(self, result: Any, waits: Callable[[], None]) -> None:
        super().__init__(result)
        self._waits = waits

    def wait(self, timeout: Any = None) -> bool:
        self._waits()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class AloneGroup(SimulatedGroup):
    """A process group of one rank that runs and others that do not."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        place: int,
        open_ones: OpenCollectives,
        listener: Listener | None = None,
    ) -> None:
        """Begin the group, whose collectives the listener follows."""
        super().__init__(name, members, place, open_ones)
        self._listener = listener

    def _bring(
        self, name: str, data: Any, compute: Callable[[list[Any]], None], result: Any = None
    ) -> Any:
        # after a collective that has no answer the rank keeps what it brings
        answer = _ANSWERS.get(name, _nothing)
        sent = sent_bytes(name, data, self._place, len(self._members))
        return self._announce(name, self._members, sent, lambda: answer(data, self._place), result)

    def _pass_on(self, tensors: Any, route: tuple[int, int, int], *, sends: bool) -> Any:
        tensors = list(tensors)
        pair = tuple(self._members[place] for place in route[:2])
        sent = sum(x.nbytes for x in tensors) if sends else 0
        answer = _nothing if sends else _zero
        name = "send" if sends else "recv"
        return self._announce(name, pair, sent, lambda: answer(tensors, self._place), tensors)

    def _announce(
        self,
        name: str,
        members: tuple[int, ...],
        sent: int,
        answer: Callable[[], None],
        result: Any,
    ) -> _Work:
        listener = self._listener
        if listener is None:
            answer()
            return _Work(result, lambda: None)
        number = listener.begins(name, members, sent)
        answer()
        listener.is_under_way()
        return _Work(result, lambda: listener.waits(number))


def _nothing(data: Any, place: int) -> None:
    pass


def _zero(tensors: list[Tensor], place: int) -> None:
    for tensor in tensors:
        tensor.zero_()


def _all_gather(data: tuple[Tensor, list[Tensor]], place: int) -> None:
    for other in data[1]:
        put(data[0], other)


def _all_gather_single(data: tuple[Tensor, Tensor], place: int) -> None:
    part, whole = data
    if part.numel():
        whole.view(-1, part.numel()).copy_(part.reshape(1, -1).clone())  # it may lie in `whole`


def _reduce_scatter(data: tuple[list[Tensor], Tensor], place: int) -> None:
    put(data[0][place], data[1])


def _reduce_scatter_single(data: tuple[Tensor, Tensor], place: int) -> None:
    whole, part = data
    if part.numel():
        put(whole.view(-1, part.numel())[place].clone(), part)


def _all_to_all(data: tuple[list[Tensor], list[Tensor]], place: int) -> None:
    for given, taken in zip(*data, strict=True):
        if given.numel() == taken.numel():
            put(given, taken)
        else:
            taken.zero_()


def _all_to_all_single(data: tuple[Tensor, Tensor, list[int], list[int]], place: int) -> None:
    source, target, given, taken = data
    if given or taken:
        _all_to_all(_in_pieces(data, max(len(given), len(taken))), place)
    else:
        target.copy_(source)


def _in_pieces(
    data: tuple[Tensor, Tensor, list[int], list[int]], ranks: int
) -> tuple[list[Tensor], list[Tensor]]:
    source, target, given, taken = data
    return _split(source, given, ranks), _split(target, taken, ranks)


def _split(x: Tensor, sizes: list[int], ranks: int) -> list[Tensor]:
    return list(x.split_with_sizes(sizes or [len(x) // ranks] * ranks))


def _scatter(data: tuple[list[Tensor], Tensor], place: int) -> None:
    if data[0]:
        put(data[0][place], data[1])


def _gather(data: tuple[Tensor, list[Tensor]], place: int) -> None:
    for other in data[1]:
        put(data[0], other)


_ANSWERS: dict[str, Callable[[Any, int], None]] = {
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "scatter": _scatter,
    "gather": _gather,
}
