"""Runs functions of TorchScript on split tensors as the Python functions that they were made of.

The interpreter of TorchScript asks no rule. Its functions keep the Python function, which
torch.compile traces in their place, too. A module keeps none, and is refused.
"""

import functools
from typing import Any

from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops import name_of
from lightning_shard.processes.torch_private.internals import ScriptFunction, python_of
from lightning_shard.tensor.gathering import split_in
from lightning_shard.tensor.local_mesh import LocalField
from lightning_shard.tensor.tensor import DomainTensor


@functools.cache
def install_scripted() -> None:
    """Let calls of scripted functions look at their arguments first."""
    plain = ScriptFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = split_in([args, kwargs], Tensor)
        if not any(isinstance(x, DomainTensor | LocalField) for x in tensors):
            return plain(self, *args, **kwargs)
        python = python_of(self)
        if python is None:
            raise UnsupportedOperationError(
                f"the function {name_of(self)} of TorchScript was called with a split tensor, and "
                "has lost the Python function that it was made of; call that one"
            )
        return python(*args, **kwargs)

    ScriptFunction.__call__ = call
