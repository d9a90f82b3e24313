"""Lists what can be chosen about parameters: how they are sharded, gathered, cast and made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_shard.fsdp.blocks import Wrap
from lightning_shard.memory.sizes import bytes_of
from lightning_shard.processes.arguments import is_whole, names_of
from lightning_shard.processes.device import device_of
from lightning_shard.processes.mesh import Sharding


@dataclass(frozen=True)
class ShardingOptions:
    """Options for the parameters of a network; the defaults are right for most.

    Attributes:
        mode: The tensors of which each rank holds a part. "none": nothing; the parameters stay
            those of the module, and gradients are averaged (DDP). "full": parameters, gradients and
            optimizer state, by FSDP2 (ZeRO-3). "gradients": the same, but parameters stay whole
            from forward to backward (ZeRO-2). "hybrid": as "full" within a group of processes, and
            a copy in each group (HSDP). "auto": "none" where 16 bytes for each trainable number and
            4 for each frozen one are at most 5 % of the device's memory and 4 GiB, else "full";
            "full", too, where `cpu_offload` or `mp_policy` needs it.
        shard_size: With mode "hybrid", the processes that share one set of parameters, domain ranks
            included; by default those of a node. The strategy makes its mesh with it;
            `parallelize` finds it in the mesh.
        wrap: Classes of blocks, such as `["T5Block"]`, or a function that says whether a module is
            one: the parameters of a block are gathered when it runs. By default the repeated parts
            of the network.
        min_num_params: Instead of `wrap`, the number of parameters from which on a module is a
            block.
        ignored_parameters: Patterns of names, such as `["*.norm.weight"]`, of parameters that
            every process keeps whole; their gradients are averaged.
        mp_policy: Dtypes of gathered parameters (param_dtype), of the gradients' reduction
            (reduce_dtype) and of outputs (output_dtype), beside the Trainer's precision. A mapping
            becomes torch's MixedPrecisionPolicy.
        mp_policy_where_supported: True lets mp_policy hold only on devices that compute in
            bfloat16; on others, such as the CPU, parameters keep their dtype.
        cpu_offload: True keeps shards, gradients and optimizer states in CPU memory.
        prefetch: The number of blocks that are gathered ahead of the one that computes.
        activation_checkpointing: Classes whose activations are computed again in backward instead
            of kept; True: those of the blocks.
        checkpoint_keeps: Operators of torch.ops.aten, such as `["convolution", "mm", "addmm"]`,
            whose results activation_checkpointing keeps; what lies between them is computed again.
        activation_offload: Classes whose activations lie in the host's memory until backward;
            "0GB": those of all blocks. A size such as "8GB": as much of the network's activations
            stays on the device, and only what is above it travels, each tensor's memory once. What
            cheap functions made, such as norms and activations, is computed again where it can be.
            True: a size that fits, half of what is free when the first forward begins. On a CPU
            nothing travels.
        compile_blocks: True lets torch.compile compile each block. Blocks that are given split
            tensors run as they are, after a warning.

    Raises:
        ValueError: A value is not one of these.
        TypeError: A list has something else than names.
    """

    mode: Sharding = "auto"
    shard_size: int | None = None
    wrap: Wrap | None = None
    min_num_params: int | None = None
    ignored_parameters: Sequence[str] = ()
    mp_policy: MixedPrecisionPolicy | dict[str, str | bool] | None = None
    mp_policy_where_supported: bool = False
    cpu_offload: bool = False
    prefetch: int = 1
    activation_checkpointing: bool | Sequence[str] = False
    checkpoint_keeps: Sequence[str] = ()
    activation_offload: bool | str | Sequence[str] = False
    compile_blocks: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        object.__setattr__(self, "mp_policy", policy_of(self.mp_policy))
        if self.mode not in (modes := ("auto", "none", "full", "gradients", "hybrid")):
            raise ValueError(
                f"sharding must be one of {', '.join(map(repr, modes))}; got {self.mode!r}."
            )
        if self.shard_size is not None and self.mode != "hybrid":
            raise ValueError(
                f"shard_size {self.shard_size} needs sharding 'hybrid'; got sharding {self.mode!r}."
            )
        if self.mode == "none" and self.cpu_offload:
            raise ValueError(
                "cpu_offload keeps shards in CPU memory, and sharding 'none' makes none; leave one "
                "of them out, or use sharding 'full'."
            )
        self._refuse_types()
        if self.wrap is not None and self.min_num_params is not None:
            raise ValueError("wrap and min_num_params both choose the blocks; give one of them.")
        self._refuse_activations()

    def _refuse_types(self) -> None:
        """Refuse what is of no use as this option, such as "False" from a command line."""
        for name in ("mp_policy_where_supported", "cpu_offload", "compile_blocks"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        for name in ("prefetch", "shard_size", "min_num_params"):
            value = getattr(self, name)
            if not is_whole(value) and (value is not None or name == "prefetch"):
                raise ValueError(f"{name} must be a whole number from 1 on; got {value!r}.")
        function = "" if isinstance(self.wrap, type) else self.wrap
        lists: dict[str, Any] = {"wrap": () if callable(function) else self.wrap or ()}
        lists["ignored_parameters"] = self.ignored_parameters
        for name in ("activation_checkpointing", "activation_offload"):
            value = getattr(self, name)
            lists[name] = () if isinstance(value, bool) or value is None else value
        for name, value in lists.items():
            names_of(value, name)
        if isinstance(self.activation_checkpointing, str):  # a size is one of activation_offload
            object.__setattr__(self, "activation_checkpointing", [self.activation_checkpointing])

    def _refuse_activations(self) -> None:
        """Refuse what would recompute or move nothing."""
        names = [self.checkpoint_keeps] if isinstance(self.checkpoint_keeps, str) else None
        object.__setattr__(self, "checkpoint_keeps", tuple(names or self.checkpoint_keeps))
        if self.checkpoint_keeps and not self.activation_checkpointing:
            raise ValueError(
                "checkpoint_keeps says what activation_checkpointing does not compute again; give "
                "activation_checkpointing, too."
            )
        if self.checkpoint_keeps and self.compile_blocks:
            raise ValueError(
                "checkpoint_keeps cannot see the operators inside of the graphs of compile_blocks; "
                "give one of them."
            )
        for name in self.checkpoint_keeps:
            if not hasattr(torch.ops.aten, name):
                raise ValueError(
                    f"checkpoint_keeps: torch.ops.aten has no operator {name!r}; a profile shows "
                    "the names of a network's operators, such as aten::addmm."
                )
        if isinstance(self.activation_offload, str):
            try:
                bytes_of(self.activation_offload, "activation_offload")
            except ValueError as err:
                raise ValueError(f"{err} Names of classes come in a list.") from None
        if self.activation_offload and self.compile_blocks:
            raise ValueError(
                "activation_offload cannot move what compile_blocks keeps inside of a graph; give "
                "one of them."
            )
        if self.activation_offload and self.activation_offload == self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing leaves activation_offload nothing to move in the same "
                "blocks; give one of them, or each its own classes."
            )

    @property
    def activation_budget(self) -> int | None:
        """Bytes of activations that stay on the device with activation_offload; None: no size."""
        if isinstance(self.activation_offload, str):
            return bytes_of(self.activation_offload, "activation_offload") or None
        return None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy of FSDP2."""
        assert isinstance(self.mp_policy, MixedPrecisionPolicy)
        return self.mp_policy

    def on(self, device_type: str) -> "ShardingOptions":
        """Return the options as they hold on devices of this type."""
        if not self.mp_policy_where_supported or device_of(device_type).computes_bfloat16:
            return self
        return replace(self, mp_policy=None)

    @property
    def needs_shards(self) -> bool:
        """True if an option is given that only FSDP2 serves, also on a single process."""
        return self.cpu_offload or self.policy != MixedPrecisionPolicy()

    def described(self) -> dict[str, str]:
        """Describe the options by name, in words that are equal in all processes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {f"mp_policy.{f.name}": getattr(self.policy, f.name) for f in fields(self.policy)}
        del values["mp_policy"]
        values["sharding"] = values.pop("mode")
        return {name: getattr(v, "__qualname__", str(v)) for name, v in values.items()}


def policy_of(given: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy:
    """Make the policy that a mapping describes, as a config does: `{reduce_dtype: bfloat16}`.

    Raises:
        ValueError: A key is no field of the policy, or a value no dtype of floating point.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    known = [f.name for f in fields(MixedPrecisionPolicy) if f.name != "param_dtype_override_fn"]
    values: dict[str, Any] = {}
    if not isinstance(given, Mapping | None):
        raise ValueError(f"mp_policy must map its fields, {', '.join(known)}; got {given!r}.")
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
