"""neuraloperator in float64: its layer computes in complex64 whatever its weights are."""

import sys
import types
from pathlib import Path

import neuralop.layers.spectral_convolution as source
import torch
from neuralop.layers.spectral_convolution import SpectralConv
from torch import nn


def double_spectral_conv() -> type[nn.Module]:
    """The installed layer with complex128 where its source says complex64."""
    name = "neuralop.layers.double_spectral_convolution"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__package__ = "neuralop.layers"
        code = Path(source.__file__).read_text().replace("torch.cfloat", "torch.cdouble")
        exec(code, module.__dict__)
        sys.modules[name] = module
    return sys.modules[name].SpectralConv


def to_double(module: nn.Module) -> nn.Module:
    """`module` with float64 and complex128 parameters, and spectral layers that compute in them."""
    for child in module.modules():
        if type(child) is SpectralConv:
            child.__class__ = double_spectral_conv()
    module.double()
    for p in module.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    return module
