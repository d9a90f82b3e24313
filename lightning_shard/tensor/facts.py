"""Answers without a rule what a tensor knows of itself: from the wrapper, or from the graph.

`FACTS` maps a function to what answers it. The answer is given the function and its arguments, of
which the first one is a split tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.torch_private.internals import (
    accessors,
    copy_of_tensor,
    is_view,
    without_rules,
)
from lightning_shard.tensor.part import part_of

aten: Any = torch.ops.aten


def attributes_of(names: str) -> set[Any]:
    """Find the getters of attributes of `Tensor`, as `__torch_function__` is given them."""
    found = (getattr(Tensor, name, None) for name in names.split())
    return {attribute.__get__ for attribute in found if attribute is not None}


# Facts that the wrapper itself knows: shape, dtype, device.
OF_WRAPPER = attributes_of(
    "shape ndim dtype device layout itemsize nbytes is_sparse is_sparse_csr is_quantized is_cuda "
    "is_cpu is_xpu is_mps is_mtia is_ipu is_xla is_hpu is_maia is_vulkan is_meta is_mkldnn "
    "is_nested name names volatile"
) | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.__hash__, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed,
    Tensor.element_size, Tensor.get_device, Tensor.is_inference, Tensor.is_same_size,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_inference,
    torch.get_device,
}  # fmt: skip
# Facts of the autograd graph and of memory, which are the local tensor's.
OF_LOCAL = attributes_of("is_leaf retains_grad output_nr _version grad_dtype") | {
    Tensor.is_conj, Tensor.is_neg, Tensor.is_pinned, torch.is_conj, torch.is_neg,
}  # fmt: skip

# Operators that autograd runs on wrappers. A dispatch mode of the user, such as FlopCounterMode, is
# given them and calls them: `DomainTensor.__torch_dispatch__` answers.
OF_AUTOGRAD = {
    aten.add.Tensor, aten.detach.default, aten.detach_.default, aten.isnan.default, copy_of_tensor,
}  # fmt: skip


def _of_wrapper(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with without_rules():
        return func(*args, **kwargs)


def _of_local(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    return func(part_of(x).local, *args, **kwargs)


def _requires_grad(func: Callable[..., Any], x: Any) -> bool:
    """Also of a copy that an autograd.Function saved, which has its history on the wrapper."""
    if part_of(x).local.requires_grad:
        return True
    with without_rules():
        return x.grad_fn is not None


def _grad_fn(func: Callable[..., Any], x: Any) -> Any:
    """The node of the local graph; behind a custom Function the user's own one."""
    node = part_of(x).local.grad_fn
    return getattr(node, "function", node)  # see autograd_function.py


def _base(func: Callable[..., Any], x: Any) -> Any:
    """Say that there is a base, as FSDP2 asks; what is found of it shows the part's own rows."""
    return x if is_view(part_of(x).local) else None


def _of_memory(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Strides and formats of the whole tensor in one process; row by row if nobody knows them."""
    part = part_of(x)
    if isinstance(part, Subdomain):
        whole = torch.empty_strided(part.shape, part.strides_shown, device="meta")
    else:  # a lazy spectrum
        whole = torch.empty(x.shape, device="meta")
    return func(whole, *args, **kwargs)


def _facts() -> dict[Any, Callable[..., Any]]:
    facts: dict[Any, Callable[..., Any]] = dict.fromkeys(OF_WRAPPER | OF_AUTOGRAD, _of_wrapper)
    facts |= dict.fromkeys(OF_LOCAL, _of_local)
    return facts | {
        accessors("requires_grad").__get__: _requires_grad,
        accessors("grad_fn").__get__: _grad_fn,
        accessors("_base").__get__: _base,
        Tensor.stride: _of_memory,
        Tensor.is_contiguous: _of_memory,
    }


FACTS = _facts()
