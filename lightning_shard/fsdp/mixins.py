"""Puts a mixin before the class of a module, which keeps its class by name and by isinstance."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def mix_in(module: nn.Module, mixin: type, **state: Any) -> None:
    """Let `mixin` come before the class of `module`, in place, and set its attributes.

    A second time it sets the attributes only: a module is prepared for each fit and test.
    """
    cls = type(module)
    if not isinstance(module, mixin):
        metaclass: Any = type(cls)  # the class's own
        module.__class__ = metaclass(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    module.__dict__.update(state)


def is_a(module: nn.Module, package: str, *names: str) -> bool:
    """Whether a class of `package` with one of the names is among the classes of `module`."""
    return any(
        cls.__name__ in names and cls.__module__.startswith(package) for cls in type(module).__mro__
    )


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules under `root`, itself included, that FSDP2 has mixed its own class into."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
