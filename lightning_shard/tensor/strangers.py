"""Lets a split tensor be of a tensor subclass of another package, such as torchvision's `Image`.

`x.as_subclass(Image)` of a split tensor is of a class that is made here: a split tensor and an
`Image`. Rules compute; the stranger's own `__torch_function__` then says of which class a result
is.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.ops import name_of
from lightning_shard.tensor.facts import FACTS
from lightning_shard.tensor.gathering import split_in


class _Answered:
    """A torch function whose result is known; for the stranger it is the function itself."""

    def __init__(self, func: Callable[..., Any], result: Any) -> None:
        self._func, self._result = func, result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._result

    def __eq__(self, other: object) -> bool:
        return other is self._func or other is self

    def __hash__(self) -> int:
        return hash(self._func)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)


@functools.cache
def split_class(base: Any, stranger: type[Tensor]) -> Any:
    """Return the class of split tensors (`base`) that are of a stranger's class, too."""

    def run(
        cls: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = base.__torch_function__(func, types, args, kwargs)
        found = list(split_in(result, Tensor))
        split = [isinstance(t, base) for t in found]
        if func in FACTS or not found or any(split) != all(split):
            return result
        plain: Any = stranger.__torch_function__
        seen = tuple(cls if issubclass(t, base) else t for t in types)
        own = cls
        if not all(split):  # a whole tensor is of the stranger's own class
            own, seen = stranger, tuple(stranger if t is cls else t for t in seen)
        named = plain.__func__(own, _Answered(func, result), seen, args, kwargs or {})
        return result if named is NotImplemented else named  # beside another stranger

    body = {"__torch_function__": classmethod(run), "__module__": stranger.__module__}
    return type(stranger.__name__, (base, stranger), body)


def class_for(base: Any, cls: type[Tensor]) -> Any:
    """Return the class of a split tensor that is to be of the class `cls`.

    Raises:
        UnsupportedOperationError: The class computes below autograd itself.
    """
    if cls is Tensor or issubclass(cls, base):
        return base if cls is Tensor else cls
    if computes(cls):
        raise UnsupportedOperationError(
            f"a tensor split over ranks cannot be of the class {name_of(cls)}, which dispatches "
            "its functions or copies attributes itself; take lightning_shard.gather(tensor) first"
        )
    return split_class(base, cls)


def computes(cls: type[Tensor]) -> bool:
    """Return True for classes that split tensors cannot be of, and that `shard` drops.

    Parameters; classes that dispatch, as DTensor and FakeTensor do; classes that copy all
    attributes of one tensor to another, the part of a split tensor too, as MONAI's MetaTensor.
    """
    own = issubclass(cls, torch.nn.Parameter) or hasattr(cls, "copy_meta_from")
    return own or dispatches(cls)


def dispatches(cls: type[Tensor]) -> bool:
    """Return True for classes of tensors that compute below autograd themselves."""
    between = cls.__mro__[: cls.__mro__.index(Tensor)]
    return any("__torch_dispatch__" in vars(c) for c in between)
