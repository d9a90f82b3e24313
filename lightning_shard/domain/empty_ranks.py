"""Keeps the graphs and the errors of all ranks alike where a rank has no rows.

Every rank must take part in every collective of the backward pass, those of a user's hooks of
parameters too, so gradients must arrive in the same order.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import all_gather_small
from lightning_shard.domain.local_group import gathered_objects
from lightning_shard.domain.memory_format import format_of
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.narrow import is_list
from lightning_shard.processes.torch_private.internals import views_replayed


def concatenated(
    pieces: Sequence[Tensor], dim: int, sources: Sequence[Tensor] | None = None
) -> Tensor:
    """`torch.cat`, also for pieces of one dim without rows, which it drops from the graph.

    A rank whose gradient lacks what the others' have would leave them waiting in a collective.

    Args:
        pieces: The tensors that are joined.
        dim: The dim along which they are joined.
        sources: The tensors that they are rows of. The result lies in memory as all of these do,
            and row by row where they differ.
    """
    if pieces[0].ndim > 1:
        formats = {format_of(x) for x in sources or pieces if x.numel()}
        stored = formats.pop() if len(formats) == 1 else torch.contiguous_format
        result = torch.cat(list(pieces), dim)  # it lies otherwise where a piece has no rows
        return (
            result if stored == torch.contiguous_format else result.contiguous(memory_format=stored)
        )
    return torch.cat([piece.unsqueeze(0) for piece in pieces], 1).squeeze(0)


def empty_attached(
    shape: Sequence[int], *sources: Tensor | None, is_curved: bool = False
) -> Tensor:
    """Make a tensor without elements, or of zeros, that depends on `sources`.

    A rank without rows must still take part in every collective of the backward pass, and give each
    parameter a gradient (of zeros). Each of these has memory of its own, since gradients are summed
    over ranks in place. They arrive in the order of `sources`, as from one node of torch with these
    operands: autograd begins with the node that was made last.

    Args:
        shape: The shape of the result.
        sources: The operands of the operation; the first one gives the dtype.
        is_curved: True where torch's gradient of each operand has all of them in its own graph, as
            that of a convolution has. Then second derivatives call the same collectives.
    """
    kept = [s for s in sources if s is not None]
    pieces = [s.flatten()[:0].to(kept[0].dtype) for s in reversed(kept)]
    nothing = concatenated(pieces, 0)
    nothing = nothing.sum(dtype=kept[0].dtype)  # autocast would change it
    if is_curved and (nothing.is_floating_point() or nothing.is_complex()):
        nothing = nothing.exp() - 1  # torch makes floats of integers here
    return nothing * kept[0].new_ones(tuple(shape))


def without_rows(
    run: Callable[[Tensor], Tensor], x: Tensor, least: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Run a kernel on zeros in the place of rows that are missing, and cut its result to `shape`.

    The graph then has the nodes of the ranks that have rows, in derivatives of any order.

    Args:
        run: The kernel.
        x: Its input, which may have no rows.
        least: The numbers of rows of each dim that the kernel needs.
        shape: The shape of the result, which has no elements.
    """
    found = run(_resized(x, [max(n, m) for n, m in zip(x.shape, least, strict=True)]))
    return _resized(found, shape)


def _resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Copy `x` with zeros added at the end of each dim, or with its last rows cut."""
    more = [wanted - n for n, wanted in zip(x.shape, shape, strict=True)]
    return F.pad(x, [m for added in reversed(more) for m in (0, added)])


def written_alike(target: Subdomain, write: Callable[[], Any], index: Any = ...) -> Any:
    """Write into `target[index]`, or raise on all ranks what torch raises on some.

    torch refuses to write into memory that several elements share, as of an expanded tensor. On a
    rank that has no elements nothing is shared. There the ranks tell each other. Of some functions,
    such as `zero_`, torch raises in backward. Here it is raised at once.
    """
    layout, everyone = target.layout, tuple(range(len(target.layout.grid.sizes)))
    if not (layout.leaves_empty or index is not ...):
        return write()
    is_empty = target.local.numel() == 0
    steps = [  # 0 where rows share memory, and where there are none
        int(n == 1 or (n > 1 and (step != 0 or is_empty or bool(layout.axes(d)))))
        for d, (step, n) in enumerate(zip(target.local.stride(), layout.shape, strict=True))
    ]
    if layout.leaves_empty:  # the steps of a part without elements mean nothing
        given = torch.tensor(steps, device=target.local.device)
        steps = [int(step) for step in all_gather_small(target, everyone, given).amin(0)]
    if all(steps):
        return write()
    result, error = None, None
    try:
        result = write()
        if target.local.requires_grad and torch.is_grad_enabled():
            _refuse_shared(torch.empty_strided(layout.shape, steps, device="meta"), index)
    except Exception as raised:
        error = raised
    raises = torch.tensor(error is not None, device=target.local.device)
    if bool(all_gather_small(target, everyone, raises).any()):
        group = target.domain.group(everyone)
        errors = gathered_objects(error and (type(error), str(error)), group)
        kind, text = next(each for each in errors if each)
        raise error or (kind if kind in (IndexError, ValueError) else RuntimeError)(text)
    return result


def _refuse_shared(whole: Tensor, index: Any) -> None:
    """Raise torch's error if elements that an index chooses share memory."""
    entries = list(index) if is_list(index) else [index]
    is_view = all(isinstance(e, int | slice | EllipsisType) for e in entries)
    is_view = is_view and not isinstance(index, list)
    part = whole[index] if is_view else whole
    if any(step == 0 and n > 1 for step, n in zip(part.stride(), part.shape, strict=True)):
        torch.zeros(1, device="cpu").expand(2).add_(1)


def replaying_views(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run a rule where some rank has no elements.

    A view that is written gets its graph anew, from one of `as_strided`. Of a tensor without
    elements the gradient of that has no graph, and a second backward pass would lack the
    collectives that the other ranks call. So such views are made again as they were made, on all
    ranks: then their collectives come in the same order.
    """

    def replayed(*call: Any) -> Any:
        with views_replayed(True):
            return run(*call)

    return replayed
