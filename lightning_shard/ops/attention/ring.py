"""Ring attention: blocks of keys and values come by turns, so no rank ever holds them all.

In step t a rank attends to the keys and values of the rank t places further, and merges the result
with what it has by the running maximum and sum of exponentials of a softmax (Milakov and
Gimelshein, 2018; Liu, Zaharia and Abbeel, 2023). The backward pass fetches each block again and
sends its gradients to the owner; the weights are computed again, tile by tile, from the normalizer
of each row. A second derivative goes through the forward pass once more, this time recorded.

L queries, S keys, E features: queries (..., l, E), keys (..., s, E), values (..., s, E), mask
(..., l, S) with its columns in the order of the ranks that own the keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_shard.domain.comm import add_to_owners, exchange
from lightning_shard.domain.forward_mode import in_forward_mode
from lightning_shard.domain.half import wide
from lightning_shard.domain.local_group import rank_in
from lightning_shard.domain.together import Route
from lightning_shard.processes.torch_private.typed import typed_torch

TILE = 2**20  # elements of a tile of weights: smaller ones take longer, larger ones memory

Span = tuple[int, int]  # start and length
State = tuple[Tensor, Tensor, Tensor]  # maximum and sum of exponentials of each row; weighted sum


@dataclass(frozen=True)
class Ring:
    """The route of the blocks of keys and values, seen from one rank.

    Attributes:
        counts: Number of keys that each rank holds.
        group: The ranks that hold keys.
        scale: Factor of the products of queries and keys.
        queries: Places of each rank's queries in the sequence, in causal attention.
        keys: Places of all keys, in the order of their ranks, in causal attention.
    """

    counts: Sequence[int]
    group: dist.ProcessGroup
    scale: float
    queries: Sequence[Tensor] | None = None
    keys: Tensor | None = None

    def steps(self) -> Iterator[tuple[Span, Route]]:
        """Yield the keys that come next, in the order of their ranks, and their route."""
        rank, ranks = rank_in(self.group), len(self.counts)
        for step in range(ranks):
            owners = [(peer + step) % ranks for peer in range(ranks)]
            taken = [self._taken(peer, owner) for peer, owner in enumerate(owners)]
            sends = [((0, taken[p]),) if owner == rank else () for p, owner in enumerate(owners)]
            receives = [(taken[rank],) if p == owners[rank] else () for p in range(ranks)]
            order, moves = ((owners[rank], 0),), step > 0 and any(taken)
            columns = sum(self.counts[: owners[rank]]), taken[rank]
            yield columns, Route(tuple(sends), tuple(receives), order, moves)

    def _taken(self, peer: int, owner: int) -> int:
        """Count the keys of `owner` that `peer` needs: all, or none if all are later."""
        count = self.counts[owner]
        if count and self.queries is not None and self.keys is not None:
            keys, queries = self.keys.narrow(0, sum(self.counts[:owner]), count), self.queries[peer]
            return count if len(queries) and keys.min() <= queries.max() else 0
        return count

    def later(self, rows: Span, columns: Span, device: torch.device) -> Tensor | None:
        """Mark the keys that come after each query; None without a causal order."""
        if self.queries is None or self.keys is None:
            return None
        queries = self.queries[rank_in(self.group)].narrow(0, *rows)
        return self.keys.narrow(0, *columns).to(device) > queries.to(device)[:, None]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, as torch computes it.

    Args:
        q: Queries, (..., l, E); like keys and values in the type that autocast gives them.
        k: This rank's keys, (..., s, E), with as many heads or fewer (grouped queries).
        v: This rank's values, (..., s, Ev).
        mask: Boolean (True takes part) or additive; broadcasts to (..., l, S).
        ring: The route of the blocks.
    """
    mask = None if mask is None else typed_torch.atleast_2d(mask)
    if in_forward_mode():
        with torch.autocast(q.device.type, enabled=False):
            return _merged(q, k, v, mask, ring)[0]
    return _RingAttention.apply(q, k, v, mask, ring)


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            out, normalizer = _merged(q, k, v, mask, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, mask, out, normalizer)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, mask, out, normalizer = ctx.saved_tensors
        with torch.autocast(out.device.type, enabled=False):
            if not torch.is_grad_enabled() and not in_forward_mode():
                learned = ctx.needs_input_grad[3]
                found = _gradients(q, k, v, mask, out, normalizer, grads[0], learned, ctx.ring)
                return *found, None
            again, _ = _merged(q, k, v, mask, ctx.ring)
            needed = ctx.needs_input_grad[:4]
            wanted = [x for x, need in zip((q, k, v, mask), needed, strict=True) if need]
            found = iter(torch.autograd.grad(again, wanted, grads[0], create_graph=True))
        return *(next(found) if need else None for need in needed), None


def _merged(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each row's sum of exponentials (inf where all is masked)."""
    tiles = _tiles(q, ring)
    states: list[State | None] = [None] * len(tiles)
    for columns, route in ring.steps():
        keys, values = _block(k, route, ring), _block(v, route, ring)
        for i, rows in enumerate(tiles):
            part = _part(mask, rows, columns)
            scores = _scores(_rows(q, rows), keys, part, rows, columns, ring)
            states[i] = _with_block(states[i], scores, values)
    outs: list[Tensor] = []
    normalizers: list[Tensor] = []
    for state in states:
        assert state is not None
        top, total, weighted = state
        empty = total == 0
        outs.append(weighted / torch.where(empty, 1, total))
        normalizers.append(torch.where(empty, math.inf, top + total.log()))
    return torch.cat(outs, -2).to(q.dtype), torch.cat(normalizers, -2)


def _with_block(state: State | None, scores: Tensor, values: Tensor) -> State:
    """The running softmax with one more block of keys.

    A block of no keys takes part too, so that the same exchanges follow on every rank, also in the
    second derivative.
    """
    top = scores.new_full((*scores.shape[:-1], 1), -math.inf) if state is None else state[0]
    if scores.shape[-1]:
        top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
    shift = torch.where(top == -math.inf, 0, top)
    powers = (scores - shift).exp()
    total, weighted = powers.sum(-1, keepdim=True), powers @ _like_heads(values, powers)
    if state is not None:
        factor = (state[0] - shift).exp()
        total, weighted = total + factor * state[1], weighted + factor * state[2]
    return top, total, weighted


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    normalizer: Tensor,
    grad: Tensor,
    learned: bool,
    ring: Ring,
) -> list[Tensor | None]:
    """The gradients of queries, keys, values, and of the mask if it is `learned`.

    With weights p = exp(scores - normalizer) and g the gradient of the output, the gradient of the
    scores is p * (g @ v.T - delta), where delta = (g * out).sum(-1). So the gradients of all
    operands are those of the sum of p * (g @ v.T - delta) with normalizer and delta held constant.
    """
    grad = wide(grad)
    delta = (grad * out).sum(-1, keepdim=True)
    of_q, of_k, of_v = (torch.zeros_like(wide(x)) for x in (q, k, v))
    of_mask = torch.zeros_like(mask) if mask is not None and learned else None
    for columns, route in ring.steps():
        keys, values = _block(k, route, ring), _block(v, route, ring)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _tiles(q, ring) if keys.shape[-2] else ():
            queries, part = _rows(q, rows), _part(mask, rows, columns)
            leaves = [queries, keys, values, *([part] if learned and part is not None else [])]
            leaves = [x.detach().requires_grad_() for x in leaves]
            with torch.enable_grad():
                part = leaves[3] if learned else part
                scores = _scores(leaves[0], leaves[1], part, rows, columns, ring)
                weights = (scores - _rows(normalizer, rows)).exp()
                pulled = _rows(grad, rows) @ _like_heads(leaves[2], grad).mT
                total = (weights * (pulled - _rows(delta, rows))).sum()
            found = torch.autograd.grad(total, leaves)
            _rows(of_q, rows).add_(found[0])
            of_keys += found[1]
            of_values += found[2]
            if of_mask is not None:
                part = _part(of_mask, rows, columns)
                assert part is not None
                part.add_(found[3])
        _give_back(of_k, of_keys, route, ring)
        _give_back(of_v, of_values, route, ring)
    return [of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask]


def _block(x: Tensor, route: Route, ring: Ring) -> Tensor:
    return wide(exchange(x, x.ndim - 2, route, ring.group))


def _give_back(total: Tensor, block: Tensor, route: Route, ring: Ring) -> None:
    """Add the gradient of a block to that of its owner's rows."""
    if route.moves:
        total += add_to_owners(block, block.ndim - 2, total.shape[-2], route, ring.group)
    elif block.shape[-2]:  # my own
        total += block


def _scores(
    q: Tensor, keys: Tensor, mask: Tensor | None, rows: Span, columns: Span, ring: Ring
) -> Tensor:
    scores = (wide(q) @ _like_heads(keys, q).mT) * ring.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    later = ring.later(rows, columns, q.device)
    return scores if later is None else scores.masked_fill(later, -math.inf)


def _tiles(q: Tensor, ring: Ring) -> list[Span]:
    """The rows of each tile of weights; one tile at least."""
    size = max(TILE // max(math.prod(q.shape[:-2]) * max(ring.counts), 1), 1)
    starts = range(0, max(q.shape[-2], 1), size)
    return [(start, min(size, q.shape[-2] - start)) for start in starts]


def _rows(x: Tensor, rows: Span) -> Tensor:
    return x.narrow(-2, *rows)


def _part(mask: Tensor | None, rows: Span, columns: Span) -> Tensor | None:
    """The part of the mask for a tile of weights."""
    if mask is None:
        return None
    mask = mask if mask.shape[-1] == 1 else mask.narrow(-1, *columns)
    return mask if mask.shape[-2] == 1 else _rows(mask, rows)


def _like_heads(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values of grouped queries, one for each head of `like`."""
    if x.ndim < 3 or like.ndim < 3 or x.shape[-3] in (1, like.shape[-3]):
        return x
    return x.repeat_interleave(like.shape[-3] // x.shape[-3], -3)
