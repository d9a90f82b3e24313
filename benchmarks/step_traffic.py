"""Counts collectives, and storages that stay, at the operators of torch: below any package."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COLLECTIVES = ("c10d", "_c10d_functional")
_NOTHING = ("wait_tensor", "barrier", "monitored_barrier_")


class Seen(TorchDispatchMode):
    """Counts while open what plain tensors go through.

    Attributes:
        collectives: Calls.
        sent: Bytes that this rank sends to others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.sent = 0
        self.hosted: set[int] = set()  # storages that stand for those of the host
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, FakeTensor) for t in types):  # DTensor asks for shapes
            return func(*args, **(kwargs or {}))
        if any(t is not Tensor for t in types):  # a tensor class, which calls plain operators
            return NotImplemented
        if func.namespace in _COLLECTIVES and func._opname not in _NOTHING:
            self.collectives += 1
            self.sent += _sent(func._opname, args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage)
        return result

    def alive(self, net: nn.Module) -> tuple[int, int]:
        """Bytes still there, on the device and on the host, without the parameters of `net`."""
        gc.collect()  # what only a cycle holds is not kept for backward
        local = [p.to_local() if isinstance(p, DTensor) else p for p in net.parameters()]
        known = {p.untyped_storage()._cdata for p in local}
        sizes: dict[int, int] = {}
        for key, ref in self._made.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None and key not in known:
                sizes[key] = storage.nbytes()  # FSDP2 gives memory back, and keeps the storage
        host = sum(size for key, size in sizes.items() if key in self.hosted)
        return sum(sizes.values()) - host, host


def _sent(name: str, args: Any) -> int:
    """What the algorithms of least traffic send to others; all ranks are in the group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name in ("alltoall_base_", "all_to_all_single"):
        given, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
        rows = len(given)
        own = splits[rank] if splits else rows // ranks
        return given.nbytes * (rows - own) // max(rows, 1)
    if name == "alltoall_":
        return sum(t.nbytes for peer, t in enumerate(args[1]) if peer != rank)
    sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if name in ("allreduce_", "all_reduce", "all_reduce_", "allreduce_coalesced_"):
        return 2 * sum(sizes) * (ranks - 1) // ranks
    if name in ("send", "broadcast_"):
        return sum(sizes)
    return 0 if name == "recv_" else min(sizes, default=0) * (ranks - 1)  # gathers, scatters
