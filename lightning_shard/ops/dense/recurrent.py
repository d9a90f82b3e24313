"""Recurrent layers: sequences are independent of each other, so the batch dim may be split.

T steps, B sequences, E features, L layers (times directions), H hidden features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import local_part
from lightning_shard.domain.empty_ranks import empty_attached
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements

Hidden = Tensor | Subdomain | Sequence[Tensor | Subdomain]


@implements(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, limits="split time, packed")
def recurrent(
    func: Callable[..., Any],
    x: Subdomain,
    hidden: Hidden,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: Any = None,
) -> Any:
    """Map (T, B, E), or (B, T, E) if `batch_first`, to outputs and the last states (L, B, H)."""
    if batch_first is None or not isinstance(x, Subdomain):
        raise UnsupportedOperationError("packed sequences, or split states of plain sequences")
    batch = 0 if batch_first else 1
    if x.layout.axes(1 - batch, 2):
        raise UnsupportedOperationError(
            "a recurrence needs all steps and features of a sequence on one rank; split the batch "
            "dim, into which spatial dims can be flattened"
        )
    if dropout and train:
        raise UnsupportedOperationError("dropout between the layers of a recurrence")
    states = _states(hidden)
    sequences, grid = x.layout.dims[batch], x.layout.grid
    layouts = [
        Layout(((Factor(h.shape[0]),), sequences, (Factor(h.shape[2]),)), grid) for h in states
    ]
    parts = [local_part(h, layout) for h, layout in zip(states, layouts, strict=True)]
    options = (params, has_biases, num_layers, 0.0, train, bidirectional, batch_first)

    def run(x: Tensor, *states: Tensor) -> Any:
        own = states[0] if isinstance(hidden, Tensor | Subdomain) else list(states)
        return func(x, own, *options)

    features = states[0].shape[-1] * (2 if bidirectional else 1)
    layout = x.layout.with_dim(2, features)
    if 0 in x.layout.local_shape:
        shapes = [layout.local_shape, *(each.local_shape for each in layouts)]
        results = [empty_attached(shape, x.local, *parts, *params) for shape in shapes]
        results = _typed(run, results, x.local, *parts)
    else:
        results = run(x.local, *parts)
    return tuple(
        x.like(local, each) for local, each in zip(results, [layout, *layouts], strict=True)
    )


@implements(torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def recurrent_cell(
    func: Callable[..., Any], x: Subdomain, hidden: Hidden, *params: Tensor | None
) -> Subdomain:
    """Take one step: map (B, E) and a state (B, H) to the new state."""
    return lstm_cell(func, x, hidden, *params)[0]


@implements(torch.lstm_cell)
def lstm_cell(
    func: Callable[..., Any], x: Subdomain, hidden: Hidden, *params: Tensor | None
) -> tuple[Subdomain, ...]:
    """Take one step: map (B, E) and states (B, H) to new states."""
    if not isinstance(x, Subdomain) or x.layout.axes(1):
        raise UnsupportedOperationError("a recurrence needs all features of a sequence on one rank")
    states = _states(hidden)
    layouts = [Layout((x.layout.dims[0], (Factor(h.shape[-1]),)), x.layout.grid) for h in states]
    parts = [local_part(h, layout) for h, layout in zip(states, layouts, strict=True)]

    def run(x: Tensor, *states: Tensor) -> Any:
        found = func(x, states[0] if len(states) == 1 else list(states), *params)
        return [found] if isinstance(found, Tensor) else found

    if 0 in x.layout.local_shape:
        results = [empty_attached(p.shape, x.local, *parts, *params) for p in parts]
        results = _typed(run, results, x.local, *parts)
    else:
        results = run(x.local, *parts)
    return tuple(x.like(local, each) for local, each in zip(results, layouts, strict=True))


def _typed(
    run: Callable[..., Any], results: Sequence[Tensor], *operands: Tensor
) -> Sequence[Tensor]:
    """The results of no sequence in the types that autocast gives the other ranks'."""
    if not torch.is_autocast_enabled(operands[0].device.type):
        return results
    found = run(*(t.new_zeros([max(n, 1) for n in t.shape]) for t in operands))
    return [r.to(f.dtype) for r, f in zip(results, found, strict=True)]


def _states(hidden: Hidden) -> list[Tensor | Subdomain]:
    return [hidden] if isinstance(hidden, Tensor | Subdomain) else list(hidden)
