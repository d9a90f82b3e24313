"""Which library carries the collectives of a device."""

import importlib
import importlib.util

import torch
import torch.distributed as dist

from lightning_shard.processes.torch_internals import internal

ONECCL = "oneccl_bindings_for_pytorch"


def default_backend(device: torch.device) -> str:
    """The process-group backend for tensors of `device`: nccl, xccl, ccl or gloo.

    For Intel GPUs torch's own `xccl`; `ccl` of oneccl_bindings_for_pytorch, which is then imported,
    only where a torch without `xccl` is installed.

    Raises:
        RuntimeError: The device is an Intel GPU and neither is installed.
    """
    if device.type != "xpu":
        return dist.get_default_backend_for_device(device)
    if dist.is_xccl_available():
        return "xccl"
    if importlib.util.find_spec(ONECCL) is not None:
        importlib.import_module(ONECCL)  # registers ccl
        return "ccl"
    raise RuntimeError(
        f"training on {device} needs torch's xccl backend, without which torch {torch.__version__} "
        f"was built, or the package {ONECCL}, which is not installed; install torch's build for "
        "XPU."
    )


def let_gloo_stand_beside(device_type: str) -> None:
    """Let groups of gloo be made beside a default group that is bound to a device of this type.

    torch asks each new group for its backend on that device, and knows gloo for the CPU and CUDA
    only; on Intel GPUs `new_group(backend="gloo")` would raise, in Lightning's `prepare_data` too
    (https://github.com/pytorch/pytorch/issues/162237, open with torch 2.15).
    """
    known = internal("torch.distributed.Backend.backend_capability")[dist.Backend.GLOO]
    if device_type not in known:
        known.append(device_type)
