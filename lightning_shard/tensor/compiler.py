"""Compiles a traced block, and sees that all its collectives are still there, in order.

Ranks whose graphs differ in this would wait for each other forever. What a rank traced is what the
uncompiled block does, on every rank; so each rank compares its own graphs with that, and no rank
needs to ask another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.tracing import places_traced
from lightning_shard.domain.wire import places_in
from lightning_shard.processes.torch_private.names import internal


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile as torch.compile does by default, backward at once, too.

    Raises:
        UnsupportedOperationError: A graph has other collectives than were traced.
    """
    # a part that backward does not compile must be known before forward runs
    with internal("torch._functorch.config.patch")(force_non_lazy_backward_lowering=True):
        return internal("torch._inductor.compile_fx.compile_fx")(
            graph, inputs, inner_compile=_checked
        )


def _checked(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    forward, backward = places_traced()
    wanted = backward if options.get("is_backward") else forward
    if places_in(graph.graph) != wanted:
        raise UnsupportedOperationError("the compiler moved or left out an exchange of rows")
    return internal("torch._inductor.compile_fx.compile_fx_inner")(graph, inputs, **options)
