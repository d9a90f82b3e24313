"""Counts the bytes that this rank sends to others, at the collectives of torch.distributed.

Of the reductions and gathers it counts what the algorithms of least traffic send over P ranks:
a reduce-scatter of n bytes (P - 1) / P * n, an all-gather as much of its result, and an all-reduce
both.

Functions of torch.distributed are replaced for that time. A `TorchDispatchMode` was tried instead
(torch 2.15): it counts the same 60 collectives of a step of FSDP2, and those of DTensor, which are
missed here. But it lies in a private module, and names operators without documented signatures.
Under a mode no wrong call is tried on meta tensors (tensor/wrong_calls.py), so a rehearsed step
would lose the sentences that say what was wrong.
"""

import contextlib
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Counts bytes that were sent, and collectives that were called."""

    bytes: int = 0
    calls: int = 0


Around = Callable[[str, int], AbstractContextManager[Any]]


@contextlib.contextmanager
def counted(around: Around | None = None) -> Generator[Traffic]:
    """Count what this rank sends inside the block.

    Args:
        around: Makes a context for each collective, from its name and the bytes that it sends; the
            collective is called within.
    """
    traffic = Traffic()
    plain = {name: getattr(dist, name, None) for name in SENT}  # some are names of torch 2.15
    for name, collective in plain.items():
        if collective is not None:
            setattr(dist, name, _counting(collective, SENT[name], traffic, around))
    try:
        yield traffic
    finally:
        for name, collective in plain.items():
            if collective is not None:
                setattr(dist, name, collective)


def _counting(
    collective: Callable[..., Any],
    sent: Callable[..., int],
    traffic: Traffic,
    around: Around | None,
) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        n = sent(**given.arguments)
        traffic.calls += 1
        traffic.bytes += n
        with around(collective.__name__, n) if around else contextlib.nullcontext():
            return collective(*args, **kwargs)

    return call


# Each of these finds among a call's arguments what `sent_bytes` asks for.


def _all_to_all_single(
    input: Tensor,  # noqa: A002 - torch's name of the argument
    input_split_sizes: list[int] | None,
    group: Any,
    **_: Any,
) -> int:
    return _sent("all_to_all_single", (input, None, input_split_sizes, None), group)


def _all_to_all(input_tensor_list: list[Tensor], group: Any, **_: Any) -> int:
    return _sent("all_to_all", (input_tensor_list, None), group)


def _all_gather(group: Any, **given: Any) -> int:
    part: Any = given.get("input_tensor", given.get("input"))
    return _sent("all_gather_single", (part, None), group)


def _reduce_scatter(output: Tensor, group: Any, **_: Any) -> int:
    return _sent("reduce_scatter_single", (None, output), group)


def _all_reduce(tensor: Tensor, group: Any, **_: Any) -> int:
    return _sent("all_reduce", [tensor], group)


def _sent(name: str, data: Any, group: Any) -> int:
    return sent_bytes(name, data, dist.get_rank(group), dist.get_world_size(group))


SENT: dict[str, Callable[..., int]] = {
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def sent_bytes(name: str, data: Any, place: int, ranks: int) -> int:
    """Count the bytes that a rank sends in a collective, by the algorithm of least traffic.

    Args:
        name: The name of the collective, as a group of simulated ranks calls it.
        data: The tensors that the rank brings to it.
        place: The place of the rank in the group.
        ranks: The number of ranks of the group.
    """
    match name:
        case "all_reduce":
            return 2 * sum(x.nbytes for x in data) * (ranks - 1) // ranks
        case "broadcast" | "reduce":
            return sum(x.nbytes for x in data)
        case "all_gather" | "all_gather_single":
            return data[0].nbytes * (ranks - 1)
        case "gather" | "send":
            return data[0].nbytes
        case "reduce_scatter" | "reduce_scatter_single":
            return data[1].nbytes * (ranks - 1)
        case "scatter" | "all_to_all":
            return sum(x.nbytes for peer, x in enumerate(data[0]) if peer != place)
        case "all_to_all_single":
            source, _, given, _ = data
            own = source.nbytes // ranks if not given else _bytes_of_rows(source, given[place])
            return source.nbytes - own
        case _:
            return 0


def _bytes_of_rows(x: Tensor, rows: int) -> int:
    return x.nbytes * rows // max(len(x), 1)
