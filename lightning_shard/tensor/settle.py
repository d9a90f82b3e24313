"""Computes all modes of a lazy spectrum before a function that does not take it as it is.

From then on the tensor holds them: it can be written, and its views are views of these modes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import changes_first
from lightning_shard.ops.spectral.fft import is_served_lazily

_COPIES = {Tensor.clone, torch.clone}  # nothing of the spectrum is seen in what they give


def unsettled(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    fields: Iterable[Any],
) -> list[Any]:
    """Find the fields that are to be computed before a function runs.

    Raises:
        UnsupportedOperationError: It writes into a spectrum of which slices were taken.
    """
    lazy = [x for x in fields if x._part.lazy]
    if not lazy or func in _COPIES or is_served_lazily(func, args):
        return []
    writes = changes_first(func, tuple(args), kwargs)
    if writes and any(x is args[0] and getattr(x._part, "given", ()) for x in lazy):
        raise UnsupportedOperationError(
            "slices of this spectrum were taken, and would not show the write, as they do in "
            "torch; write into spectrum.clone()"
        )
    return [x for x in lazy if not getattr(x._part, "given", ())]


def read_only(modes: Subdomain) -> Subdomain:
    """Return modes that the tensor does not hold: a write into them is refused, as it is lost."""
    return modes.copy(modes.local, modes.layout, modes.strides)
