"""Reads numbers of sharded tensors as those of the whole.

`float(p.grad.norm())`, `.item()` and `if p.sum() > 1:` read what lies on this rank in torch 2.11 to
2.15: of a sum that is still a part on each rank, its part (torch.distributed.tensor,
`_sharding_prop.py`, which leaves `_local_scalar_dense` out). The whole takes all ranks, so they
meet first: a rank that reads alone would wait for ever.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import read_numbers_of_dtensors

WAIT_S = 120.0  # for the other ranks
_reads: Counter[tuple[int, ...]] = Counter()  # of the tensors of these ranks, so far
PROCESS_STATE = {"_reads": _reads}


def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be the same on all ranks, from now on."""
    read_numbers_of_dtensors(_number)


@torch.no_grad()
def _number(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
    (tensor,) = args
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    if len(ranks) > 1:
        _meet(ranks)
    return operator(tensor.full_tensor())


def _meet(ranks: tuple[int, ...]) -> None:
    """Wait until each of the ranks reads its next number.

    Raises:
        RuntimeError: Some do not.
    """
    store, rank, number = store_of_attempt(), dist.get_rank(), _reads[ranks]
    _reads[ranks] += 1

    def place(rank: int, number: int) -> str:
        return f"number/{ranks[0]}-{len(ranks)}-{ranks[-1]}/{number}/{rank}"

    store.set(place(rank, number), "")
    try:
        store.wait([place(r, number) for r in ranks], timedelta(seconds=WAIT_S))
    except dist.DistStoreError as error:
        missing = [r for r in ranks if not store.check([place(r, number)])]
        raise RuntimeError(
            f"rank {rank} reads a number of a sharded tensor, as float(p.grad.norm()) does, and "
            f"ranks {missing} did not within {WAIT_S:.0f} s: all ranks must read it, so read it "
            "outside of what only one rank runs."
        ) from error
    if number:
        store.delete_key(place(rank, number - 1))
