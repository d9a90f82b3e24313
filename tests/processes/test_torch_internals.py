"""What torch does not promise: all names are there, and nothing of torch is replaced at import."""

import subprocess
import sys

import pytest
import torch

from lightning_shard.processes import torch_internals

IMPORT = """
import torch, torch.utils.checkpoint, torch.distributed.checkpoint, torch._dynamo
import lightning.pytorch, neuralop.models
from torch.nn.modules._functions import BackwardHookFunction, SyncBatchNorm
from torch.utils.checkpoint import CheckpointFunction
from torch.autograd import Function
import opt_einsum.backends.dispatch as opt_einsum

def functions():
    owners = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional,
              "Function": Function, "SyncBatchNorm": SyncBatchNorm,
              "CheckpointFunction": CheckpointFunction, "BackwardHook": BackwardHookFunction,
              "distributed": torch.distributed, "checkpoint": torch.utils.checkpoint,
              "nn": torch.nn, "Module": torch.nn.Module, "fft": torch.fft}
    found = {(o, n): v for o, owner in owners.items() for n, v in vars(owner).items()
             if callable(v) or isinstance(v, classmethod | staticmethod | property)}
    return found | {("opt_einsum", n): v for n, v in opt_einsum._aliases.items()}

before = functions()
import lightning_shard
for name in dir(lightning_shard):
    getattr(lightning_shard, name)
after = functions()
print(sorted(k for k, v in before.items() if after.get(k) is not v and after.get(k) != v))
"""


def test_every_internal_name_is_there():
    assert torch_internals.missing() == []


def test_a_removed_name_is_listed_with_what_breaks(monkeypatch):
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    monkeypatch.delattr(torch.distributed.device_mesh.DeviceMesh, "_flatten")
    lost = torch_internals.missing()
    assert [line.partition(":")[0] for line in lost] == [
        "torch._C._is_any_autocast_enabled",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
    ]
    torch_internals.internal.cache_clear()
    with pytest.raises(ImportError, match=r"(?s)_is_any_autocast_enabled.*_flatten"):
        torch_internals.internal("torch._C._is_any_autocast_enabled")


def test_nothing_of_torch_is_replaced_at_import():
    """A module that another one imports may appear in torch; a function that was there stays."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip().splitlines()[-1:] == ["[]"], found.stderr
