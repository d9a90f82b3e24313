"""Transforms of Hermitian signals: real transforms of the conjugate, scaled the other way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.ops.registry import composes

_OTHER_WAY = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


@composes(torch.fft.hfft, torch.fft.hfft2, torch.fft.hfftn)
def to_real(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    inverse = getattr(torch.fft, "ir" + func.__name__.removeprefix("fft_h"))
    args, kwargs = _scaled_the_other_way(func, args, kwargs)
    return inverse(x.conj(), *args, **kwargs)


@composes(torch.fft.ihfft, torch.fft.ihfft2, torch.fft.ihfftn)
def to_hermitian(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    forward = getattr(torch.fft, "r" + func.__name__.removeprefix("fft_ih"))
    args, kwargs = _scaled_the_other_way(func, args, kwargs)
    return forward(x, *args, **kwargs).conj()


def _scaled_the_other_way(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments (n or s, dim, norm), with the norm of the opposite direction."""
    norm = args[2] if len(args) > 2 else kwargs.get("norm")
    if norm not in _OTHER_WAY:
        raise RuntimeError(f'{func.__name__}: invalid normalization mode: "{norm}"')
    return args[:2], {**kwargs, "norm": _OTHER_WAY[norm]}
