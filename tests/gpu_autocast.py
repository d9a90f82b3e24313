"""Makes autocast of the CPU cast what that of a GPU casts, so that machines without one test it.

Autocast casts other functions on the CPU than on a GPU. There sums, norms, exponentials, softmax
and interpolations run in float32, and Fourier transforms are left alone. Which functions are cast
is read from torch's own table of kernels (`AutocastCUDA`). How they are cast is told in
https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference and in ATen/autocast_mode.h.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.ops.autocast import _type_of

NARROW = set(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear "
    "addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose".split()
)
WIDEST = set(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot "
    "scatter_add".split()
)
RESULT = set(  # their result is to be float32, if the call does not name another type
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm".split()
)
ELSEWHERE = {"_cudnn_rnn", "binary_cross_entropy"}  # of no rule; refused, as on the CPU


def casts(device: str) -> set[str]:
    """The operators that autocast of a device casts, with their overloads."""
    found: set[str] = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            table = torch._C._dispatch_dump_table(name).splitlines()
            key = f"Autocast{device}:"
            found |= {name for line in table if line.startswith(key) and "fallthrough" not in line}
    return found


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Autocast casts as on a GPU; tensors stay on the CPU. For the whole process."""
    _type_of.cache_clear()
    library = Library("aten", "IMPL")
    gpu = casts("CUDA")
    for name in sorted(gpu | casts("CPU")):
        operator = _operator(name)
        if operator.__name__.split(".")[0] in ELSEWHERE:
            continue
        kernel = _kernel(operator) if name in gpu else fallthrough_kernel
        library.impl(operator, kernel, "AutocastCPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
        _type_of.cache_clear()


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(operator: Any) -> Callable[..., Any]:
    name = operator.__name__.split(".")[0]
    if name == "norm":  # another overload takes the type
        typed = {
            "Scalar": "ScalarOpt_dtype",
            "ScalarOpt_dim": "ScalarOpt_dim_dtype",
            "names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",  # before torch 2.15
        }
        typed_norm = getattr(torch.ops.aten.norm, typed[operator._overloadname])

    def run(*args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(key):
            if name == "norm":
                dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
                flags = {"keepdim": False} if len(args) == 3 and "keepdim" not in kwargs else {}
                return typed_norm(*args, **flags, **kwargs, dtype=dtype)
            if name not in RESULT:
                args, kwargs = _cast(name, args, kwargs)
            elif _is_cast(args[0]) and kwargs.get("dtype") is None:
                # by position it comes last, and only if it is given
                given = [a for a in args if isinstance(a, torch.dtype)]
                kwargs |= {} if given else {"dtype": torch.float32}
            return operator(*args, **kwargs)

    return run


def _cast(name: str, args: Any, kwargs: Any) -> Any:
    narrow = torch.get_autocast_dtype("cpu")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _is_cast(x)]
    if name in NARROW:
        dtype = narrow
    elif name in WIDEST:
        dtype = narrow if all(x.dtype == narrow for x in tensors) else torch.float32
    else:
        dtype = torch.float32
    return tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x) else x, (args, kwargs))


def _is_cast(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64
