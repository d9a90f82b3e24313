"""Tells pagers which storages FSDP2 frees and allocates itself."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from lightning_shard.fsdp.paging.mode import open_pagers
from lightning_shard.processes.torch_private.internals import replace_internal

_FOLDER = "torch.distributed.fsdp._fully_shard"
_ALLOCATES = (f"{_FOLDER}._fsdp_param.alloc_storage", f"{_FOLDER}._fsdp_param_group.alloc_storage")
_FREES = f"{_FOLDER}._fsdp_param.free_storage"


@cache
def hear_of_fsdp() -> None:
    """Let pagers that are open know, from then on, what FSDP2 allocates and frees.

    What is gathered may leave while another rank has its turn. A storage that FSDP2 has freed has
    no page, so that no old numbers are brought back into it.
    """
    for name in _ALLOCATES:
        replace_internal(name, _allocating)
    replace_internal(_FREES, _freeing)


def _allocating(allocate: Callable[[Tensor], None]) -> Callable[[Tensor], Any]:
    def allocated(tensor: Tensor) -> None:
        for pager in open_pagers():
            pager.bring(tensor)
        allocate(tensor)
        for pager in open_pagers():
            pager.know(tensor)

    return allocated


def _freeing(free: Callable[[Tensor], None]) -> Callable[[Tensor], Any]:
    def freed(tensor: Tensor) -> None:
        for pager in open_pagers():
            pager.forget(tensor)
        free(tensor)

    return freed
