"""Makes Lightning's precision plug-ins right for sharded and for complex parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.fsdp.clip import clip_grad_norm_, clip_grad_value_
from lightning_shard.lightning import (
    FabricHalfPrecision,
    FabricMixedPrecision,
    FabricPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)


class ShardedGradScaler(GradScaler):
    """Scales gradients; all ranks skip a step if one of them has a gradient that is not finite.

    torch has the same for FSDP1 (torch.distributed.fsdp.sharded_grad_scaler); here gradients are
    DTensors of several meshes, and plain ones.

    Attributes:
        device_type: The type of the gradients' device.
    """

    def __init__(self, device_type: str, **options: Any) -> None:
        """Scale on a device; `options` are those of torch's GradScaler."""
        super().__init__(device_type, **options)
        self.device_type = device_type

    @classmethod
    def like(cls, scaler: GradScaler, device_type: str) -> "ShardedGradScaler":
        """Make one with the settings of `scaler`, for gradients on the device."""
        if not scaler.is_enabled():  # it was made for a device that is not there
            return cls(device_type)
        return cls(
            device_type,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        local: Any = _LocalShards(optimizer)
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        anywhere = torch.stack([found_inf, *(f.to(found_inf.device) for f in found.values())])
        anywhere = anywhere.amax(0)
        if dist.is_initialized():
            dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        devices = found.keys() or [found_inf.device]
        return {device: anywhere.to(device) for device in devices}


class _LocalShards:
    """Shows the scaler this rank's part of each gradient, as if it were an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.param_groups: list[dict[str, list[Tensor]]] = [
            {"params": []} for _ in optimizer.param_groups
        ]
        for mine, group in zip(self.param_groups, optimizer.param_groups, strict=True):
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                    holder = grad.detach()
                    holder.grad = grad
                    mine["params"].append(holder)


def use_device(plugin: FabricPrecision, device_type: str) -> None:
    """Autocast, and scale gradients, for the device that trains.

    Lightning 2.6 makes its plug-in of mixed precision for CUDA where the accelerator is no CPU; on
    other devices autocast would then do nothing, and the scaler would be disabled.
    """
    if isinstance(plugin, MixedPrecision | FabricMixedPrecision):
        is_of_device, plugin.device = plugin.device == device_type, device_type
        scaler = plugin.scaler
        if scaler is None or (
            isinstance(scaler, ShardedGradScaler) and scaler.device_type == device_type
        ):
            return
        if is_of_device:
            _skip_together(scaler, device_type)
        else:
            plugin.scaler = ShardedGradScaler.like(scaler, device_type)


def _skip_together(scaler: GradScaler, device_type: str) -> None:
    """Let a scaler skip steps on all ranks; the program may hold it, and may have extended it."""
    cls = type(scaler)
    scaler.__class__ = type(cls.__name__, (ShardedGradScaler, cls), {"__module__": cls.__module__})
    vars(scaler)["device_type"] = device_type


def refuse_to_drop_imaginary_parts(module: nn.Module, plugin: FabricPrecision) -> None:
    """Refuse a precision that casts the module: of complex parameters it keeps the real part.

    Raises:
        ValueError: `plugin` would do that.
    """
    dropped = [name for name, p in module.named_parameters() if p.is_complex()]
    if dropped and isinstance(plugin, HalfPrecision | FabricHalfPrecision):
        raise ValueError(
            f"precision {plugin.precision!r} would drop the imaginary part of complex parameters "
            f"({', '.join(dropped[:3])}); use precision 'bf16-mixed', or '32-true' with "
            "mp_policy={'param_dtype': 'bfloat16'}."
        )


def clip_over_shards(plugin: Precision, before: Callable[[Optimizer], None]) -> None:
    """Let the plug-in clip gradients by their norm over all shards.

    Lightning asks the plug-in, of which it makes one of several classes, not the strategy.

    Args:
        plugin: The plug-in, which is changed in place.
        before: Gives shards the gradients that a step has assigned, before they are clipped.
    """
    of_norm, of_value = plugin.clip_grad_by_norm, plugin.clip_grad_by_value

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        before(optimizer)
        if _holds_shards(optimizer):
            clip_grad_norm_(plugin.main_params(optimizer), clip_val)
        else:
            of_norm(optimizer, clip_val)

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        before(optimizer)
        if _holds_shards(optimizer) or _is_complex(optimizer):  # torch clamps no complex ones
            clip_grad_value_(plugin.main_params(optimizer), clip_val)
        else:
            of_value(optimizer, clip_val)

    plugin.clip_grad_by_norm, plugin.clip_grad_by_value = by_norm, by_value


def _holds_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"])


def _is_complex(optimizer: Optimizer) -> bool:
    return any(p.is_complex() for g in optimizer.param_groups for p in g["params"])
