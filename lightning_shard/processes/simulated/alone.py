"""A process group of which one rank runs alone; each collective gives it what it brings itself.

So the rank computes, holds and sends what it would among the others, on other numbers: from a peer
it gets its own rows where they have the same size, and zeros where they have not.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_shard.processes.simulated.collectives import put
from lightning_shard.processes.simulated.group import SimulatedGroup

_AnyWork: Any = dist.Work  # torch does not document how to subclass it


class _Work(_AnyWork):
    """A collective that has ended when it begins."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future = Future[Any]()
        future.set_result(self._result)
        return future


class AloneGroup(SimulatedGroup):
    """What torch.distributed calls for a group of one rank that runs and others that do not."""

    def _bring(
        self, name: str, data: Any, compute: Callable[[list[Any]], None], result: Any = None
    ) -> Any:
        if name in _ANSWERS:  # after the others the rank keeps what it brings
            _ANSWERS[name](data, self._place)
        return _Work(result)

    def _pass_on(self, tensors: Any, route: tuple[int, int, int], *, sends: bool) -> Any:
        tensors = list(tensors)
        if not sends:
            for tensor in tensors:
                tensor.zero_()
        return _Work(tensors)


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
