"""Transforms of Hermitian signals are real transforms of the conjugate, scaled the other way."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.registry import composes, implements, name_of, rule_for
from lightning_shard.processes.torch_private.typed import fft

_OTHER_WAY = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


_INVERSE: dict[Any, Callable[..., Tensor]] = {
    fft.hfft: fft.irfft,
    fft.hfft2: fft.irfft2,
    fft.hfftn: fft.irfftn,
}
_FORWARD: dict[Any, Callable[..., Tensor]] = {
    fft.ihfft: fft.rfft,
    fft.ihfft2: fft.rfft2,
    fft.ihfftn: fft.rfftn,
}


@composes(*_INVERSE)
def to_real(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Transform of a Hermitian signal, by the inverse real transform of its conjugate."""
    args, kwargs = _scaled_the_other_way(func, args, kwargs)
    return _INVERSE[func](x.conj(), *args, **kwargs)


@implements(*_FORWARD)
def to_hermitian(func: Callable[..., Tensor], x: Subdomain, *args: Any, **kwargs: Any) -> Subdomain:
    """Inverse of the Hermitian transform, by the conjugate of a real transform."""
    args, kwargs = _scaled_the_other_way(func, args, kwargs)
    forward = rule_for(_FORWARD[func])
    assert forward is not None
    found = forward.run(_FORWARD[func], x, *args, **kwargs).read()
    local = found.local.conj_physical()
    # torch transforms the dims one after the other, and leaves several in an order of its library
    return found.alike(local) if func is fft.ihfft else found.in_any_order(local, found.layout)


def _scaled_the_other_way(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments (n or s, dim, norm), with the norm of the opposite direction."""
    norm = args[2] if len(args) > 2 else kwargs.get("norm")
    if norm not in _OTHER_WAY:
        raise RuntimeError(f'{name_of(func)}: invalid normalization mode: "{norm}"')
    return args[:2], {**kwargs, "norm": _OTHER_WAY[norm]}
