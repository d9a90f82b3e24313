"""Says whether a block is being traced for the compiler, which wants two things to be different.

Collectives are operators with a place, so that what was compiled can be compared with what was
traced. Constants of earlier runs become constants of the graph.
"""

from collections.abc import Generator
from contextlib import contextmanager

from lightning_shard.processes.torch_private.internals import backward_pass
from lightning_shard.processes.torch_private.names import internal

# a variable of the process, not of a thread: autograd's engine traces backward in its own threads
_traced = 0
_forward = _backward = 0  # collectives since the region was last traced from its beginning
_outer = -1  # the backward pass that was under way then
PROCESS_STATE = {
    "_traced": _traced, "_forward": _forward, "_backward": _backward, "_outer": _outer,
}  # fmt: skip


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


def trace_begins() -> None:
    """Count collectives anew: the compiler traces a region several times."""
    global _forward, _backward, _outer
    _forward, _backward, _outer = 0, 0, backward_pass()


def next_place() -> int:
    """Give the next collective its place: 1, 2, ... in forward, and -1, -2, ... in backward."""
    global _forward, _backward
    if backward_pass() == _outer:
        _forward += 1
        return _forward
    _backward += 1
    return -_backward


def places_traced() -> tuple[list[int], list[int]]:
    """List the places of forward, and those of backward, as they were traced."""
    return [i + 1 for i in range(_forward)], [-i - 1 for i in range(_backward)]
