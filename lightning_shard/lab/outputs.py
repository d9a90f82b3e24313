"""Follows what modules or functions give in a step, whole, on the ranks of a run.

Parts are gathered, which is a collective: all ranks follow the same calls.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.data.tree import leaves_of
from lightning_shard.lightning import LightningModule
from lightning_shard.ops.registry import name_of
from lightning_shard.tensor.placement import gather

# modules between a function and its caller, and modules whose calls are not the user's
_CARRIERS = ("torch.overrides", "torch.nn.functional", "torch.functional", "torch._tensor",
             "torch._jit_internal", "torch._ops")  # fmt: skip
_INFRASTRUCTURE = ("torch.distributed.", "torch.utils.", "torch.autograd.", "torch.optim.",
                   "torch.nn.utils.", "lightning.", "lightning_shard.")  # fmt: skip


@dataclass
class Output:
    """The tensors that one call gave.

    Attributes:
        name: The name of the module, or of the function.
        kind: The class of the module; "" for a function.
        values: The tensors that it gave, whole, on the first rank.
    """

    name: str
    kind: str = ""
    values: list[Tensor] = field(default_factory=list[Tensor])


class Outputs:
    """Appends what is called from now on until `close` to a list, in the order of the ends."""

    def __init__(self, root: LightningModule, module: str | None, found: list[Output]) -> None:
        """Begin.

        Args:
            root: The module that is trained.
            module: The module whose functions are followed, in its first call; None: follow the
                outputs of all modules. "" is the step itself.
            found: The list.
        """
        self._found, self._mode, self.is_open = found, _Functions(self._note), True
        self._hooks: list[Any] = []
        self._entered = self._done = False
        for name, part in root.named_modules() if module is None else ():
            if part is not root:
                self._hooks.append(part.register_forward_hook(self._noting(name)))
        if module == "":
            self._enter()
        elif module is not None:
            part = root.get_submodule(module)
            self._hooks += [
                part.register_forward_pre_hook(lambda *_: self._enter()),
                part.register_forward_hook(lambda *_: self._leave()),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        self._leave()
        for hook in self._hooks:
            hook.remove()

    def _noting(self, name: str) -> Any:
        def note(part: nn.Module, _: Any, output: Any) -> None:
            kind = next(c for c in type(part).__mro__ if "fsdp" not in c.__module__).__name__
            self._note(name, kind, output)

        return note

    def _note(self, name: str, kind: str, value: Any) -> None:
        if self.is_open:
            self._found.append(Output(name, kind, _whole_tensors(value)))

    def _enter(self) -> None:
        if not self._done:
            self._mode.__enter__()
            self._entered = self._done = True

    def _leave(self) -> None:
        if self._entered:
            self._mode.__exit__(None, None, None)
            self._entered = False


class _Functions(TorchFunctionMode):
    """Notes what each function gives that is called by the user's code, and not by others."""

    def __init__(self, note: Callable[[str, str, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # shards call functions that one process does not (tests/lab/test_check.py)
        if _is_of_user(sys._getframe(1)) and _numbers(result):
            self._note(name_of(func), "", result)
        return result


def _is_of_user(frame: FrameType | None) -> bool:
    """Return whether a function is called by a module, and not by what shards its parameters."""
    while frame is not None and _module_of(frame) in _CARRIERS:
        frame = frame.f_back
    return frame is not None and not _module_of(frame).startswith(_INFRASTRUCTURE)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _whole_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a value; all ranks must come here."""
    whole = [gather(x.detach()).clone() for x in _numbers(value)]
    return whole if dist.get_rank() == 0 else [x[:0] if x.ndim else x for x in whole]


def _numbers(value: Any) -> list[Tensor]:
    tensors = [x for x in leaves_of(value) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]
