"""The run of one process that the ranks are compared with: computed once in a session."""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import REFERENCES


def computed_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` runs on rank 0 of the first pool that asks; every later call reads the result.

    All ranks call it together. Its arguments are numbers, names and dtypes, which tell one result
    from another by their text, and its result is what `torch.save` takes.
    """

    @functools.wraps(function)
    def result(*args: Any, **kwargs: Any) -> Any:
        call = repr((function.__module__, function.__qualname__, args, sorted(kwargs.items())))
        path = Path(os.environ[REFERENCES]) / hashlib.sha256(call.encode()).hexdigest()
        if dist.get_rank() == 0 and not path.exists():
            written = path.with_suffix(f".{os.getpid()}")  # two sessions' workers may race
            torch.save(function(*args, **kwargs), written)
            written.replace(path)
        dist.barrier()
        return torch.load(path, weights_only=False)

    return result
