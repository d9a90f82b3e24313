"""Runs what a simulated device was asked, in any order that its streams and events allow."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

PLACE_BYTES = 2**14  # of every place of memory, so that any tensor can get the place of any other
GARBAGE = 0xFF  # each byte of memory that nobody has written; a float of them is not a number

Run = Callable[[list[Tensor]], None]


@dataclass(frozen=True)
class Part:
    """A tensor, by where it lies."""

    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    conjugated: bool = False

    def of(self, memory: list[Tensor]) -> Tensor:
        typed = memory[self.place].view(self.dtype)
        found = typed.as_strided(self.shape, self.strides, self.offset)
        return found.conj() if self.conjugated else found


@dataclass(frozen=True)
class Kernel:
    """What an operator does in memory.

    Attributes:
        func: The operator.
        given: Its arguments, a `Part` in the place of each tensor.
        made: The number of each result that is no view, and where it goes.
    """

    func: Any
    given: Any
    made: tuple[tuple[int, Part], ...]

    def __call__(self, memory: list[Tensor]) -> None:
        args, kwargs = tree_map_only(Part, lambda part: part.of(memory), self.given)
        with torch.no_grad():
            results = tensors(self.func(*args, **kwargs))
        for number, part in self.made:
            part.of(memory).copy_(results[number])


@dataclass(frozen=True)
class Spoil:
    """A tensor ended: its memory is the next one's."""

    place: int

    def __call__(self, memory: list[Tensor]) -> None:
        memory[self.place].fill_(GARBAGE)


@dataclass(frozen=True)
class Step:
    """One entry of a stream: a kernel, an event to record, or one to wait for."""

    stream: Any
    run: Run | None = None
    records: int | None = None
    awaits: int | None = None


Order = Callable[[list[Any]], Any]  # which stream goes on, of those that wait for nothing


def orders() -> dict[str, Order]:
    """Orders that a device may take: the extremes, and some between them."""
    return {
        "computation first": lambda ready: min(ready, key=lambda s: s.name in ("out", "back")),
        "copies first": lambda ready: max(ready, key=lambda s: s.name in ("out", "back")),
        "copies out last": lambda ready: min(ready, key=lambda s: s.name == "out"),
        **{f"random {seed}": random.Random(seed).choice for seed in range(3)},
    }


def replay(
    steps: Iterable[Step], given: Iterable[tuple[Part, Tensor]], places: int, order: Order
) -> list[Tensor]:
    """Run all steps, and give the memory afterwards.

    Args:
        steps: As they were asked for.
        given: What lies in memory before; anything else is garbage.
        places: Of memory.
        order: Of the streams.
    """
    memory = [torch.full((PLACE_BYTES,), GARBAGE, dtype=torch.uint8) for _ in range(places)]
    for part, value in given:
        part.of(memory).copy_(value)
    left: dict[Any, list[Step]] = defaultdict(list)
    for step in [*steps][::-1]:
        left[step.stream].append(step)
    done: set[int | None] = {None}
    while ready := [s for s, todo in left.items() if todo and todo[-1].awaits in done]:
        step = left[order(ready)].pop()
        if step.run is not None:
            step.run(memory)
        done.add(step.records)
    assert not any(left.values()), "streams wait for each other"
    return memory


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have elements."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
