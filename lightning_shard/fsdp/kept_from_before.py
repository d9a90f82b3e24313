"""Refuses to compute with parameters that a program has kept from before they were sharded.

FSDP2 replaces each parameter of a module by a new object. A program may have kept the old one: in a
list, in a loss, in a closure. Nobody trains it any more, so what is computed from it would be wrong
without a word. An optimizer that was made before is mended, since it names its parameters.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_MAY_READ = {
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_meta", "layout",
    "is_sparse", "_version", "retains_grad", "_backward_hooks", "is_cuda", "is_xpu", "is_cpu",
}  # fmt: skip
_MAY_CALL = (
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
    Tensor.is_complex, Tensor.is_floating_point, Tensor.is_contiguous, Tensor.__hash__,
)  # fmt: skip


class KeptFromBefore(nn.Parameter):
    """A parameter that has been replaced by a shard; only its shape and kind can be read."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Read the shape and the kind of the tensor.

        Raises:
            RuntimeError: It is anything else.
        """
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if func in _MAY_CALL or (func.__name__ == "__get__" and name in _MAY_READ):
            return super().__torch_function__(func, types, args, kwargs or {})
        held = next((x for x in args if isinstance(x, cls)), None)
        shape = "" if held is None else f" of shape {tuple(held.shape)}"
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} uses a parameter{shape} that was kept, as in a "
            "list or a closure, from before the module was sharded, and which is not the module's "
            "any more: read it from the module where it is used, or keep parameters whole with "
            "sharding='none'."
        )


def refuse_kept(replaced: Iterable[nn.Parameter]) -> None:
    """Let whoever has kept one of these parameters hear that it is not trained any more.

    What was kept is this object: else it would be computed with, and nothing would train it
    (tests/trainer/test_silent_mistakes.py).
    """
    for p in replaced:
        if type(p) is nn.Parameter:
            p.__class__ = KeptFromBefore
