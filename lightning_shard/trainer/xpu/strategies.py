"""Lets Lightning's own strategies train on Intel GPUs, with what Lightning 2.6 lacks for them.

For one device of an accelerator that it does not know it takes the strategy of the CPU, and DDP
makes a stream of CUDA for each device that is no CPU. `use_xpu` puts the two classes here in the
place of Lightning's, on the strategy of the trainer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_shard.lightning import (
    Accelerator,
    CheckpointIO,
    DDPStrategy,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    StrategyRegistry,
    Trainer,
    register_ddp_comm_hook,
)
from lightning_shard.trainer.host import chosen_devices
from lightning_shard.trainer.reduce import reduce


class SingleXPUStrategy(SingleDeviceStrategy):
    """One Intel GPU, whole: `Trainer(accelerator="xpu", devices=1)`."""

    strategy_name = "single_xpu"
    _devices: tuple[torch.device, ...] = ()

    def __init__(
        self,
        device: torch.device | str | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """Choose the device.

        Args:
            device: Such as "xpu:1"; by default the Trainer's, from its `devices`.
            accelerator: Set by the Trainer.
            checkpoint_io: The plug-in that writes files; by default Lightning's.
            precision_plugin: Set by the Trainer.
        """
        super().__init__(device or "xpu:0", accelerator, checkpoint_io, precision_plugin)
        if device is not None:
            self._devices = (self.root_device,)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device, once it is chosen; set by the Trainer."""
        return list(self._devices)

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        """Take the one device.

        Raises:
            MisconfigurationException: There are others.
        """
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy 'single_xpu' trains on one device; got {[str(d) for d in devices]}. Use "
                "devices=1, or strategy 'hybrid_shard' or 'ddp' for all of them."
            )
        self._devices = tuple(devices)
        self._root_device = devices[0]


class DDPXPUStrategy(DDPStrategy):
    """Lightning's DDP without a stream of CUDA, and with hooks and means of Intel GPUs."""

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=devices, **self._ddp_kwargs)

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        register_ddp_comm_hook(
            self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
        )

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce over all ranks; a mean is a divided sum, since xccl has none of integers."""
        return reduce(tensor, self.root_device, group, reduce_op)


def use_xpu(trainer: Trainer) -> None:
    """Let the strategy of `trainer`, if it is Lightning's own, train on the Intel GPUs chosen.

    Raises:
        MisconfigurationException: It would train elsewhere.
    """
    strategy = trainer.strategy
    # the Trainer has made its own strategy before it asks the accelerator, and would train on the
    # CPU or with a stream of CUDA (tests/trainer/xpu/test_lightning.py)
    if type(strategy) is DDPStrategy:
        strategy.__class__ = DDPXPUStrategy
    elif type(strategy) is SingleDeviceStrategy:
        strategy.__class__ = SingleXPUStrategy
        if strategy.root_device.type == "cpu":
            chosen = chosen_devices(trainer)
            strategy.parallel_devices = chosen  # pyright: ignore[reportAttributeAccessIssue]
    if strategy.root_device.type != "xpu":
        raise MisconfigurationException(
            f"accelerator 'xpu' needs an Intel GPU, but {type(strategy).__name__} would train on "
            f"'{strategy.root_device}'; pass strategy='hybrid_shard', it also works on one device."
        )


def register() -> None:
    """Give the strategy of one device its name, unless another package has taken it."""
    name = SingleXPUStrategy.strategy_name
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, SingleXPUStrategy, description="One Intel GPU")


register()
