"""Finds weights, and statistics of a domain, that only some of the ranks have changed.

All ranks train the same weights, and those that share a sample compute the same statistics. A hook
of rank 0 alone may write a weight, or draw a picture with a network in its training mode. Then the
ranks go on with different networks, and each logs the mean of what they give.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.failures.failure_watch import is_of_processes
from lightning_shard.tensor.tensor import DomainTensor

_RELATIVE = 1e-4  # kernels of the ranks may round otherwise
_OF_ONE_RANK = (
    "A hook or a callback has changed it on some ranks alone, or called the module in its training "
    "mode there. Let all ranks do so, or draw pictures in eval mode."
)
_OF_SAMPLES = (
    "It is equal where ranks share their samples: each data replica may have set it of its own "
    "samples, as a layer does that begins from the first batch. Set the mean of all replicas, "
    "self.trainer.strategy.reduce(value, reduce_op='mean'). Or a hook or a callback has changed it "
    "on some ranks alone; let all ranks do so."
)


def refuse_drifted_weights(
    module: nn.Module, device: torch.device, replicas: Sequence[int], group: Any
) -> None:
    """Compare the norms of what every rank holds whole; all ranks must call this.

    Args:
        module: The module that is trained.
        device: The device of this rank's collectives.
        replicas: The data replica of each rank; buffers are compared within one.
        group: All ranks.

    Raises:
        DisagreementError: A parameter or a buffer differs; all ranks raise.
    """
    held = dict(_held(module))
    if not held or not is_of_processes():  # simulated ranks may have no numbers
        return
    own = torch.stack([_norm(x).to(device) for x in held.values()])
    gathered = own.new_empty(len(replicas) * len(held))
    dist.all_gather_into_tensor(gathered, own, group)
    norms = gathered.view(len(replicas), -1).cpu()
    of_weights = torch.tensor([isinstance(x, nn.Parameter) for x in held.values()], device="cpu")
    firsts = [replicas.index(replica) for replica in replicas]  # that share the rank's samples
    wanted = torch.where(of_weights, norms[:1], norms[firsts])
    differs = ~_are_close(norms, wanted)
    if not differs.any():
        return
    rank, column = map(int, differs.nonzero()[0])
    is_of_replicas = _are_close(norms, norms[firsts])[:, column].all()
    kind, first = ("parameter", 0) if of_weights[column] else ("buffer", firsts[rank])
    raise DisagreementError(
        f"the {kind} {[*held][column]!r} differs: its norm is {wanted[rank, column]:.6g} on rank "
        f"{first} and {norms[rank, column]:.6g} on rank {rank}, so these ranks train different "
        f"networks. {_OF_SAMPLES if is_of_replicas else _OF_ONE_RANK}"
    )


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        is_part = isinstance(x, DTensor | DomainTensor) or is_lazy(x)
        has_numbers = x.is_floating_point() or x.is_complex()  # a buffer may hold the rank
        if (
            has_numbers
            and not is_part
            and x.layout is torch.strided
            and not (x.is_nested or x.is_meta)
        ):
            yield name, x


def _are_close(norms: Tensor, others: Tensor) -> Tensor:
    return torch.isclose(norms, others, rtol=_RELATIVE, atol=0.0, equal_nan=True)


def _norm(x: Tensor) -> Tensor:
    values = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    return torch.linalg.vector_norm(values.float())
