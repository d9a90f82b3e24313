"""Averages sparse gradients, as those of `nn.Embedding(sparse=True)`, over ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NONE, _DENSE = -1, -2  # in the place of a number of rows


def may_be_sparse(module: nn.Module) -> Iterator[Tensor]:
    """Give the parameters of embeddings under `module` that ask for sparse gradients."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield part.weight


@torch.no_grad()
def mean_of_sparse(p: nn.Parameter, group: dist.ProcessGroup) -> Tensor | None:
    """Return the mean of the gradients that the ranks of `group` have of `p`.

    Args:
        p: A parameter; its gradient is sparse in its first dim, dense, or None, on each rank.
        group: The ranks. All of them call this.

    Returns:
        A sparse gradient with the rows of all ranks; a dense one if a rank has such a one; None if
        no rank has one.
    """
    ranks, grad = dist.get_world_size(group), p.grad
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
    own = _NONE if grad is None else grad.indices().shape[1] if grad.is_sparse else _DENSE
    rows = [torch.empty(1, dtype=torch.int64, device=p.device) for _ in range(ranks)]
    dist.all_gather(rows, torch.tensor([own], device=p.device), group=group)
    numbers = [int(n) for n in rows]
    if max(numbers) == _NONE and _DENSE not in numbers:
        return None
    if _DENSE in numbers:
        whole = torch.zeros_like(p) if grad is None else grad.to_dense()
        dist.all_reduce(whole, group=group)
        return whole / ranks
    most = max(numbers)
    indices = torch.zeros(most, dtype=torch.int64, device=p.device)
    values = torch.zeros(most, *p.shape[1:], dtype=p.dtype, device=p.device)
    if grad is not None:
        indices[:own], values[:own] = grad.indices()[0], grad.values()
    all_indices = [torch.empty_like(indices) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_indices, indices, group=group)
    dist.all_gather(all_values, values, group=group)
    there = [max(n, 0) for n in numbers]
    found = torch.cat([i[:n] for i, n in zip(all_indices, there, strict=True)])
    parts = torch.cat([v[:n] for v, n in zip(all_values, there, strict=True)])
    return torch.sparse_coo_tensor(found[None], parts / ranks, p.shape, device=p.device).coalesce()
