"""Recurrent layers: sequences are independent of each other, so the batch dim may be split.

T steps, B sequences, E features, L layers (times directions), H hidden features.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.align import local_part, whole
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Factor, Layout
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import implements

Hidden = Tensor | Subdomain | Sequence[Tensor | Subdomain]


@implements(
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    limits="time and features must be whole; no packed sequences; no dropout between layers",
)  # fmt: skip
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
    results = _also_of_none(run, (x.local, *parts), (batch, *[1] * len(parts)))
    return tuple(
        x.like(local, each) for local, each in zip(results, [layout, *layouts], strict=True)
    )


@implements(torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def recurrent_cell(
    func: Callable[..., Any], x: Subdomain, hidden: Hidden, *params: Tensor | None
) -> Subdomain | Tensor:
    """Take one step: map (B, E) and a state (B, H) to the new state."""
    return lstm_cell(func, x, hidden, *params)[0]


@implements(torch.lstm_cell)
def lstm_cell(
    func: Callable[..., Any], x: Subdomain, hidden: Hidden, *params: Tensor | None
) -> tuple[Subdomain | Tensor, ...]:
    """Take one step: map (B, E) and states (B, H) to new states; split features are gathered."""
    if not isinstance(x, Subdomain):
        raise UnsupportedOperationError("split states of a plain input")
    x = whole(x, 1)
    states = [whole(h, 1) if isinstance(h, Subdomain) else h for h in _states(hidden)]
    layouts = [Layout((x.layout.dims[0], (Factor(h.shape[-1]),)), x.layout.grid) for h in states]
    parts = [local_part(h, layout) for h, layout in zip(states, layouts, strict=True)]

    def run(x: Tensor, *states: Tensor) -> Any:
        found = func(x, states[0] if len(states) == 1 else list(states), *params)
        return [found] if isinstance(found, Tensor) else found

    results = _also_of_none(run, (x.local, *parts), [0] * (1 + len(parts)))
    pairs = zip(results, layouts, strict=True)
    return tuple(x.like(local, each) if each.split_dims else local for local, each in pairs)


def _also_of_none(
    run: Callable[..., Any], operands: Sequence[Tensor], dims: Sequence[int]
) -> Sequence[Tensor]:
    """Run; without sequences on one of zeros, which is dropped, so that graphs and types are alike.

    Args:
        run: The function; its results are as many as its operands, or fewer.
        operands: The input and the states.
        dims: The dim of the sequences in each operand, and so in each result.
    """
    if all(x.shape[d] for x, d in zip(operands, dims, strict=True)):
        return run(*operands)
    one = [
        torch.cat([x, x.new_zeros([1 if i == d else n for i, n in enumerate(x.shape)])], d)
        for x, d in zip(operands, dims, strict=True)
    ]
    results = run(*one)
    return [r.narrow(d, 0, 0) for r, d in zip(results, dims[-len(results) :], strict=True)]


def _states(hidden: Hidden) -> list[Tensor | Subdomain]:
    return [hidden] if isinstance(hidden, Tensor | Subdomain) else list(hidden)
