"""What a tensor knows of itself: facts of the wrapper, and facts of the autograd graph."""

from typing import Any

import torch
from torch import Tensor


def attributes_of(names: str) -> set[Any]:
    """The getters of attributes of `Tensor`, as `__torch_function__` is given them."""
    return {getattr(Tensor, name).__get__ for name in names.split()}


# Facts that the wrapper itself knows: shape, dtype, device.
OF_WRAPPER = attributes_of(
    "shape ndim dtype device layout itemsize nbytes is_sparse is_quantized is_cuda is_cpu is_xpu "
    "is_meta is_mkldnn is_nested"
) | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.__hash__, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed,
    Tensor.element_size, Tensor.get_device, Tensor.is_inference, Tensor.is_same_size,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed, torch.is_inference,
    torch.get_device,
}  # fmt: skip
# Facts of the autograd graph, which is the local tensor's.
OF_LOCAL = attributes_of("is_leaf retains_grad output_nr _version") | {
    Tensor.retain_grad, Tensor.is_contiguous, Tensor.is_conj, Tensor.is_neg, torch.is_conj,
    torch.is_neg,
}  # fmt: skip
GET_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
GET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__
