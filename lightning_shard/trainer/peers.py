"""Runs the collectives that Lightning expects of a strategy, and ends all ranks when one fails."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.processes.failures.common_place import CommonPlace
from lightning_shard.processes.failures.failure_watch import (
    FailureWatch,
    is_of_processes,
    watch_ranks,
)
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.explain import explain as explain_error
from lightning_shard.trainer.reduce import divide, gather_each, reduce


class Peers:
    """Exchanges values with the other processes of a run, and ends with them when one fails.

    Once this rank fails alone, the collectives of Lightning and of its callbacks return at once,
    since no other rank would take part in them.
    """

    def __init__(
        self,
        interrupted: Callable[[], bool],
        explain: Callable[[BaseException], None] = explain_error,
    ) -> None:
        """Begin without a watch.

        Args:
            interrupted: Returns True if the run is ending by an exception.
            explain: Adds the remedy to an error, if one is known.
        """
        self._interrupted, self._explain = interrupted, explain
        self._watch: FailureWatch | None = None
        self._alone: bool | None = None  # whether only this rank fails; None: not asked yet

    def watch(self, timeout_s: float = 1800.0) -> None:
        """Follow the failures of other ranks, until `pause_watch` or `close`, of processes.

        Args:
            timeout_s: Seconds without an answer of rank 0's store, after which this process ends.
        """
        if dist.get_world_size() == 1 or not is_of_processes():
            return
        if self._watch is None or self._watch.rests:
            self._watch, self._alone = watch_ranks(dist.get_rank(), timeout_s=timeout_s), None

    def check(self, waited_for: Sequence[int]) -> None:
        """Raise if a rank that this one waits for does not come any more."""
        if self._watch is not None:
            self._watch.check(waited_for)

    def common_place(self) -> CommonPlace | None:
        """Begin to count places at which all ranks may stop, on all; None where nobody watches."""
        return None if self._watch is None else self._watch.common_place()

    def all_end_at_once(self) -> bool:
        """Return whether a rank has told all to end wherever they are, because of SIGTERM."""
        heard = None if self._watch is None else self._watch.heard
        return heard is not None and heard.at_once

    def end_all_at_once(self) -> None:
        """Tell all ranks to end wherever they are, because of SIGTERM on this one."""
        self._alone = True
        if self._watch is not None:
            self._watch.leave()

    def pause_watch(self) -> None:
        """End a stage; callbacks and the script go on, so failures are still reported."""
        if self._watch is not None and self._alone is None:
            self._watch.rest()
        else:  # it has told what failed
            self.close()

    def close(self) -> None:
        """End the watch; the next run begins another."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def is_disconnected(self) -> bool:
        """Return True if an exception on some of the ranks forbids collectives."""
        if self._watch is None or not self._interrupted():
            return False
        if self._alone is None:  # callbacks hear of an exception before the strategy does
            self._report(self._watch, sys.exception())
        return bool(self._alone)

    def _report(self, watch: FailureWatch, error: BaseException | None) -> None:
        """Tell the others of an error, together with its remedy: theirs may be lost connections."""
        if error is not None:
            self._explain(error)
        self._alone = watch.reported_alone(error)

    def tell_uncaught(self) -> None:
        """Tell the others, from now on, of an exception that ends this process; it names the first.

        Where the loop is the user's, nobody else sees the exception.
        """
        before = sys.excepthook
        alive = weakref.ref(self)

        def report_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            peers = alive()
            if peers is not None and peers._watch is not None and peers._alone is None:
                peers._report(peers._watch, error)
            before(kind, error, trace)

        sys.excepthook = report_error

    def barrier(self, device: torch.device) -> None:
        """Wait for all ranks."""
        if self.is_disconnected() or not dist.is_initialized():
            return
        if device.index is None:
            dist.barrier()
        else:
            dist.barrier(device_ids=[device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object that rank `src` has."""
        if self.is_disconnected() or not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(
        self,
        tensor: Any,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None,
        reduce_op: Any,
        copies: int = 1,
    ) -> Any:
        """Reduce a tensor over the ranks of `group`; return anything else as it is.

        Args:
            tensor: Equal on the ranks that share samples.
            device: The device whose collectives this run uses.
            group: The ranks; None: all of them.
            reduce_op: "sum", "mean", "max" and the like, or a ReduceOp.
            copies: Number of ranks that share samples. The word "sum" over all ranks, with which
                `self.log` counts, counts them once.
        """
        if self.is_disconnected() or not isinstance(tensor, Tensor):
            return tensor
        reduced = reduce(tensor, device, group, reduce_op)
        return divide(reduced, copies) if group is None and reduce_op == "sum" else reduced

    def all_gather(
        self,
        tensor: Tensor,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None,
        sync_grads: bool = False,
    ) -> Tensor:
        """Gather one entry of each rank of `group`: (ranks, *shape).

        Raises:
            UnsupportedOperationError: The tensor is split over a domain.
        """
        if isinstance(tensor, DomainTensor):
            raise UnsupportedOperationError("all_gather of a split tensor; gather(tensor) it first")
        tensor = tensor.to(device).contiguous()
        if not dist.is_initialized():
            return tensor
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return gather_each(tensor, group)
