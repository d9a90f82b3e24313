"""Leaves storages alone that FSDP2 frees and allocates itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from lightning_shard.fsdp.paging.mode import open_pagers
from lightning_shard.processes.torch_private.internals import replace_internal

_FOLDER = "torch.distributed.fsdp._fully_shard"
_FUNCTIONS = (
    f"{_FOLDER}._fsdp_param.alloc_storage",
    f"{_FOLDER}._fsdp_param.free_storage",
    f"{_FOLDER}._fsdp_param_group.alloc_storage",
)


@cache
def leave_to_fsdp() -> None:
    """Let what FSDP2 allocates or frees stay where it is from then on, for pagers that are open."""
    for name in _FUNCTIONS:
        replace_internal(name, _told)


def _told(change: Callable[[Tensor], None]) -> Callable[[Tensor], Any]:
    def changed(tensor: Tensor) -> None:
        for pager in open_pagers():
            pager.stay(tensor)
        change(tensor)

    return changed
