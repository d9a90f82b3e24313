"""torch's functions that torch declares without types; typed.pyi has their types.

Among them are all of `fft`, `linalg` and `special`. A stub package for torch cannot give them
types: a checker reads a partial one only for a package that says itself that it is partial, which
torch does not.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

typed_torch = torch
random = torch.random
fft = torch.fft
linalg = torch.linalg
special = torch.special


def integers(x: Tensor) -> list[int]:
    """Return the entries of a tensor of integers, shape (n,), as a list."""
    return x.tolist()


def named_modules(
    root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `root` and every module below it, each with its path."""
    return root.named_modules(remove_duplicate=remove_duplicate)
