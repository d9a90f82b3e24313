"""Keeps what a step does to its whole parameters, which FSDP2 forgets when it shards them again.

A step may write into them, as for a teacher that follows its student, and may freeze them. FSDP2
gathers into the memory that it has allocated once, so `p.data = value` is written there too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.processes.torch_private.internals import (
    local_shape_and_offset,
    own_parameters,
    storage_key,
    version_of,
)


class Gathered:
    """The parameters of a sharded module that are whole at the moment, each with its shard."""

    def __init__(self, root: nn.Module) -> None:
        """Follow all parameters of `root`; they are sharded now."""
        owned = [(m, name, p) for m in root.modules() for name, p in own_parameters(m).items()]
        places = {p: (m, name) for m, name, p in reversed(owned) if isinstance(p, DTensor)}
        self._places: list[tuple[nn.Module, str, Any]] = [
            (*place, p) for p, place in places.items()
        ]
        self._memory: dict[Tensor, Tensor] = {}  # into which FSDP2 gathers
        self._begun: dict[Tensor, tuple[bool, int]] = {}  # whether it is trained, and its version
        self._slices: dict[Tensor, tuple[slice, ...]] = {}  # of the whole, by shard

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Give each whole parameter that its shard is a part of, with that shard."""
        for i, (module, name, shard) in enumerate(self._places):
            now = own_parameters(module).get(name)
            if isinstance(now, DTensor):
                self._places[i] = (module, name, now)
            elif now is not None and now.shape == shard.shape:
                yield now, shard

    def begin(self) -> None:
        """Note how the parameters are before a step."""
        for whole, _ in self.pairs():
            if whole not in self._memory:
                self._memory[whole] = whole.detach()
            self._begun[whole] = whole.requires_grad, version_of(whole)

    @torch.no_grad()
    def put_back(self) -> None:
        """Write what the whole parameters are into their shards.

        Raises:
            RuntimeError: A parameter was written that is gathered in another dtype.
        """
        for whole, shard in self.pairs():
            if whole not in self._begun:  # it is gathered since, and nobody has written
                continue
            trained, version = self._begun[whole]
            written = self._keep_memory(whole) or version_of(whole) != version
            if whole.requires_grad != trained:
                shard.requires_grad_(whole.requires_grad)
            self._begun[whole] = whole.requires_grad, version_of(whole)
            if whole.dtype == shard.dtype:  # also unless written: p.data.mul_() leaves no trace
                local: Tensor = shard.to_local()  # pyright: ignore[reportAttributeAccessIssue]
                local.copy_(whole[self._slice(shard)])
            elif written:
                raise RuntimeError(
                    f"a step wrote into a parameter of shape {tuple(whole.shape)} that is gathered "
                    f"as {whole.dtype} and kept as {shard.dtype}, so the write would lose digits; "
                    "write it in a hook such as on_train_batch_end."
                )

    def _keep_memory(self, whole: nn.Parameter) -> bool:
        """Take the value from other memory that `p.data = value` gave; True if there was some."""
        memory = self._memory[whole]
        if storage_key(memory) == storage_key(whole):
            return False
        memory.data.copy_(whole)  # no write that autograd counts: p.data = value is none
        whole.data = memory
        return True

    def _slice(self, shard: Any) -> tuple[slice, ...]:
        """Return the slices of the whole tensor that this rank's part fills."""
        if shard not in self._slices:
            where = local_shape_and_offset(shard.shape, shard.device_mesh, shard.placements)
            self._slices[shard] = tuple(slice(o, o + n) for n, o in zip(*where, strict=True))
        return self._slices[shard]


def keeping_writes(method: Callable[..., Any], gathered: Gathered) -> Callable[..., Any]:
    """Let a method that FSDP2 gathers for keep what it does to parameters while it trains."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        gathered.begin()
        output = method(*args, **kwargs)
        gathered.put_back()
        return output

    return wrapped
