"""Functions that torch writes in Python: their own code runs on the split tensors, rule by rule."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F

from lightning_shard.ops.registry import composes


@composes(F.gaussian_nll_loss, F.gumbel_softmax, F.multilabel_soft_margin_loss,
            F.multi_head_attention_forward, F.triplet_margin_with_distance_loss)  # fmt: skip
def composite(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the function's own code with split tensors; every function it calls needs a rule."""
    return own_code(func)(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def own_code(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` without its first step, which offers the call to tensor subclasses."""
    assert isinstance(func, FunctionType)
    names = {name for name in func.__globals__ if name.startswith("has_torch_function")}
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
