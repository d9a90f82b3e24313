"""Sends tensors between ranks, at once or as a step of a graph that is being traced.

A rank without a neighbour sends nothing, or uses nothing of what comes. A compiler may drop such a
collective, or move one of backward into forward, on that rank alone; then the ranks wait for each
other forever. So in a graph each collective is an operator of our own, which torch is told to have
an effect: such operators stay, stay in order, and run once, forward or backward as traced.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.forward_mode import refuse_tangent
from lightning_shard.domain.local_group import local, ranks_in
from lightning_shard.domain.one_thread import check_thread

_CARRIED = (torch.float32, torch.float64)  # dtypes that the messages of every backend know

# called before ranks exchange: to wait, for instance, for ranks that may not come
BEFORE_EXCHANGE: ContextVar[Callable[[dist.ProcessGroup], None]] = ContextVar(
    "BEFORE_EXCHANGE", default=lambda group: None
)


def _begin(group: dist.ProcessGroup) -> None:
    check_thread(group)
    BEFORE_EXCHANGE.get()(group)


def packed(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join the elements of all pieces, one after the other; a piece that lies so is not copied.

    Args:
        pieces: The tensors that are to travel.
        like: A tensor of their dtype, on their device.
    """
    flat = [piece.reshape(-1) for piece in pieces]
    if len(flat) > 1:
        return torch.cat(flat)
    one = flat[0].resolve_conj().resolve_neg().contiguous() if flat else like.new_empty(0)
    # torch calls any stride of one element contiguous, and yet shows no bytes of it
    return one if one.stride() == (1,) else one.clone(memory_format=torch.contiguous_format)


def all_to_all(
    outgoing: Tensor, sizes: list[int], given: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `given[p]` elements to each peer p, and return those that come, `sizes[p]` of peer p.

    Every dtype works on every backend: those that some do not know travel as bytes.
    """
    refuse_tangent(outgoing)
    here = local(group)
    if here is not None:
        return here.exchange(outgoing, sizes, given)
    _begin(group)
    return _all_to_all(outgoing, sizes, given, group)


def begin_all_to_all(
    outgoing: Tensor, sizes: list[int], given: list[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin the same; the function returned waits for what comes."""
    refuse_tangent(outgoing)
    here = local(group)
    if here is not None:
        rows = here.exchange(outgoing, sizes, given)
        return lambda: rows
    _begin(group)
    incoming, work = _sent(outgoing, sizes, given, group, at_once=False)

    # not named "wait": such a thread would be taken for one that may give its turn to another
    def brought() -> Tensor:
        assert work is not None
        work.wait()
        return incoming

    return brought


def all_gather(part: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the `part`s of all `ranks`, alike in shape, stacked in order."""
    refuse_tangent(part)
    shape, size = (ranks, *part.shape), part.numel()
    here = local(group)
    if here is not None:
        copies = packed([part.expand(shape)], part)
        return here.exchange(copies, [size] * ranks, [size] * ranks).view(shape)
    _begin(group)
    joined = part.new_empty(ranks * size)
    dist.all_gather_into_tensor(_carried(joined), _carried(packed([part], part)), group=group)
    return joined.view(shape)


def reduce_in_place(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Replace `x` by the sum, maximum or minimum over the ranks."""
    refuse_tangent(x)
    if ranks_in(group) == 1:
        return
    if (here := local(group)) is not None:
        here.reduce(x, op)
    else:
        _begin(group)
        dist.all_reduce(x, op, group=group)


def _all_to_all(
    outgoing: Tensor, sizes: list[int], given: list[int], group: dist.ProcessGroup
) -> Tensor:
    return _sent(outgoing, sizes, given, group, at_once=True)[0]


def _sent(
    outgoing: Tensor, sizes: list[int], given: list[int], group: dist.ProcessGroup, *, at_once: bool
) -> tuple[Tensor, dist.Work | None]:
    incoming, leaving = outgoing.new_empty(sum(sizes)), _carried(outgoing)
    unit = outgoing.element_size() // leaving.element_size()
    work = dist.all_to_all_single(
        _carried(incoming),
        leaving,
        [unit * n for n in sizes],
        [unit * n for n in given],
        group=group,
        async_op=not at_once,
    )
    return incoming, work


def _carried(flat: Tensor) -> Tensor:
    """Return the same memory in a dtype that every backend knows."""
    if flat.dtype in _CARRIED:
        return flat
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return real.view(torch.uint8)


def wait_for(work: dist.Work) -> None:
    """Wait for a collective that has begun; who looks for ranks that wait finds them here."""
    work.wait()
