"""Says whether a block is being traced for the compiler, which wants two things to be different.

Collectives are called in their functional form, of which the compiler knows shapes and order.
Constants of earlier runs become constants of the graph.
"""

from collections.abc import Generator
from contextlib import contextmanager

from lightning_shard.processes.torch_internals import internal

# of the process, not of a thread: backward is traced in threads of the autograd engine
_traced = 0


def is_traced() -> bool:
    """Say whether a compiled region is being traced now."""
    return _traced > 0


@contextmanager
def traced() -> Generator[None]:
    """Let rules know, while open, that their tensors stand for those of later calls."""
    global _traced
    _traced += 1
    try:
        yield
    finally:
        _traced -= 1


@contextmanager
def real_values() -> Generator[None]:
    """Compute, while open, with real tensors, although a region is being traced."""
    global _traced
    before, _traced = _traced, 0
    try:
        with internal("torch.utils._python_dispatch._disable_current_modes")():
            yield
    finally:
        _traced = before
