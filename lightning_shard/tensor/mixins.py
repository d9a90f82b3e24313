"""Puts a mixin before the class of a module, which keeps its class by name and by isinstance."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

MIXED_IN = "_mixed_in"  # attribute of a class that is made here


class Mixin:
    """Base of what `mix_in` puts before the class of a module, and which is registered nowhere."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing: the class stands for its base, and tltorch would list it by name."""


def mix_in(module: nn.Module, mixin: type, **state: Any) -> None:
    """Let `mixin` come before the class of `module`, in place, and set its attributes.

    A second time it sets the attributes only: a module is prepared for each fit and test.
    """
    cls = type(module)
    if not isinstance(module, mixin):
        # a wrapper would put a word into the names of its parameters; FSDP2 changes classes, too
        # (tests/fsdp/test_features.py)
        metaclass: Any = type(cls)
        marks = {"__module__": cls.__module__, MIXED_IN: True}
        module.__class__ = metaclass(cls.__name__, (mixin, cls), marks)
    module.__dict__.update(state)


def own_class(module: nn.Module) -> type[Any]:
    """Return the class that the user gave a module: FSDP2 and `mix_in` derive another one."""
    cls = type(module)
    while MIXED_IN in vars(cls) or cls.__bases__[0] is FSDPModule:
        cls = cls.__bases__[1]
    return cls


def is_a(module: nn.Module, package: str, *names: str) -> bool:
    """Return True if a class of `package` with one of the names is among those of `module`."""
    return any(
        cls.__name__ in names and cls.__module__.startswith(package) for cls in type(module).__mro__
    )
