"""Moves what blocks keep for backward to the memory of the host.

The copies are torch's: into pinned memory, queued behind the computation, and back when backward
asks. Parameters stay, since FSDP2 frees and gathers them itself. What lies on the CPU stays, too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_shard.fsdp.mixins import mix_in
from lightning_shard.processes.torch_internals import base_of


def is_moved(tensor: Tensor) -> bool:
    """Whether an offloaded block moves this tensor, which autograd saves: an activation."""
    source = base_of(tensor)
    is_parameter = source.requires_grad and source.grad_fn is None
    return type(tensor) is Tensor and tensor.layout is torch.strided and not is_parameter


class OnHost(saved_tensors_hooks):
    """While open, what autograd saves lies in the host's memory until backward needs it."""

    def __init__(self) -> None:
        """Take torch's own copies."""
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if device is None else device.type
        copies: Any = save_on_cpu(pin_memory=device is not None, device_type=kind)

        def pack(tensor: Tensor) -> Any:
            if tensor.device.type == "cpu" or not is_moved(tensor):
                return tensor
            return copies.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else copies.unpack_hook(packed)

        super().__init__(pack, unpack)


class _Offloaded:
    """Mixin of a module whose activations lie on the host from forward to backward."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing to register: the class stands for its base."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with OnHost():
            return run(*args, **kwargs)


def offload(modules: Iterable[nn.Module]) -> None:
    """Keep the activations of these modules on the host."""
    for module in modules:
        mix_in(module, _Offloaded)
