"""What can be chosen about parameters: how they are sharded, gathered, cast and made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_shard.mesh import Sharding
from lightning_shard.wrap import Wrap


@dataclass(frozen=True)
class ShardingOptions:
    """How FSDP2 treats the parameters of a network; the defaults are right for most.

    Attributes:
        sharding: What each rank holds a part of. "full": parameters, gradients and optimizer state
            (ZeRO-3). "gradients": the same, but parameters stay whole from forward to backward
            (ZeRO-2). "none": nothing; gradients are averaged (DDP). "hybrid": as "full" within the
            shard axis of the mesh, copies along its replicate axis (HSDP).
        wrap: The blocks, which are gathered one at a time: class names, or a function of a module.
            By default the repeated parts of the network.
        min_num_params: Instead of `wrap`, the number of parameters from which on a module is a
            block.
        ignored_parameters: Patterns of names, such as `"*.norm.weight"`, of parameters that every
            rank keeps whole; their gradients are averaged.
        mp_policy: Dtypes of gathered parameters, of reduced gradients and of outputs.
        cpu_offload: Whether shards, gradients and optimizer states stay in CPU memory.
        prefetch: How many blocks are gathered ahead of the one that computes.
        activation_checkpointing: Classes whose activations are computed again in backward; True:
            those of the blocks.
        compile_blocks: Whether `torch.compile` compiles each block.

    Raises:
        ValueError: A value is not one of these.
    """

    sharding: Sharding = "full"
    wrap: Wrap | None = None
    min_num_params: int | None = None
    ignored_parameters: Sequence[str] = ()
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False
    prefetch: int = 1
    activation_checkpointing: bool | Sequence[str] = False
    compile_blocks: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.sharding not in ("full", "gradients", "none", "hybrid"):
            raise ValueError(
                f"sharding must be 'full', 'gradients', 'none' or 'hybrid'; got {self.sharding!r}."
            )
        if self.prefetch < 1:
            raise ValueError(f"prefetch must be 1 or more blocks; got {self.prefetch}.")
        if self.wrap is not None and self.min_num_params is not None:
            raise ValueError("wrap and min_num_params both choose the blocks; give one of them.")

    @property
    def changes_one_process(self) -> bool:
        """Whether FSDP2 is needed on a single process, too."""
        return self.cpu_offload or self.mp_policy != MixedPrecisionPolicy()

    def described(self) -> dict[str, str]:
        """The options by name, in words that are equal in all processes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {
            f"mp_policy.{f.name}": getattr(self.mp_policy, f.name) for f in fields(self.mp_policy)
        }
        del values["mp_policy"]
        return {name: getattr(v, "__qualname__", str(v)) for name, v in values.items()}


def policy_of(given: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy:
    """The policy that a mapping describes, as a config file does: `{reduce_dtype: bfloat16}`.

    Raises:
        ValueError: A key is no field of the policy, or a value no dtype of floating point.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    known = [f.name for f in fields(MixedPrecisionPolicy) if f.name != "param_dtype_override_fn"]
    values: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if key not in known:
            raise ValueError(f"mp_policy has no field {key!r}; its fields are {', '.join(known)}.")
        values[key] = _dtype(key, value) if key.endswith("dtype") else value
    return MixedPrecisionPolicy(**values)


def _dtype(key: str, value: Any) -> torch.dtype | None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if value is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ValueError(
        f"mp_policy.{key} must be a floating-point dtype such as 'bfloat16'; got {value!r}."
    )
