"""Takes the modes of torch that belong to a thread from the caller to the threads of tiles."""

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from typing import Any

import torch

from lightning_shard.processes.torch_private.internals import open_function_modes, open_modes

Job = Callable[[int], None]


class CallerModes:
    """The modes of the thread in which this is made: gradients, inference, autocast, dispatch."""

    __slots__ = ("casts", "gradients", "inference", "modes", "stream")

    def __init__(self) -> None:
        self.gradients = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.casts: list[tuple[str, torch.dtype]] = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in _kinds()
            if torch.is_autocast_enabled(kind)
        ]
        self.modes = [*open_function_modes(), *open_modes()]
        kinds = _kinds()
        self.stream: Any = torch.accelerator.current_stream() if len(kinds) > 1 else None

    @contextmanager
    def entered(self) -> Generator[None]:
        """Give another thread these modes, while open."""
        if not (self.inference or self.casts or self.modes or self.stream):
            with torch.set_grad_enabled(self.gradients):
                yield
            return
        with ExitStack() as stack:
            if self.stream is not None:
                torch.accelerator.set_device_index(self.stream.device_index)
                stack.enter_context(self.stream)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype))
            for mode in self.modes:
                stack.enter_context(mode)
            yield


class Task:
    """A job that waits in the threads of the other tiles, with the state of the caller."""

    __slots__ = ("context", "job", "modes")

    def __init__(self, job: Job) -> None:
        self.job, self.modes = job, CallerModes()
        self.context: Context = copy_context()

    def run(self, tile: int) -> None:
        """Run the job for a tile, in its thread."""
        self.context.copy().run(self._in_modes, tile)

    def _in_modes(self, tile: int) -> None:
        with self.modes.entered():
            self.job(tile)


@functools.cache
def _kinds() -> tuple[str, ...]:
    """Return the types of the devices that this process computes on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
