"""Keeps what modules, or the functions that one of them calls, give in a step, on whole tensors."""

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.data.tree import leaves_of
from lightning_shard.ops.registry import name_of
from lightning_shard.tensor.placement import gather

_CARRIERS = ("torch.overrides", "torch.nn.functional", "torch.functional", "torch._tensor",
             "torch._jit_internal", "torch._ops")  # fmt: skip
_INFRASTRUCTURE = ("torch.distributed.", "torch.utils.", "torch.autograd.", "lightning.",
                   "lightning_shard.")  # fmt: skip


@dataclass
class Output:
    """What one call gave.

    Attributes:
        name: Of the module, or of the function.
        kind: The class of the module; "" of a function.
        values: Its tensors, whole; with the first rank.
    """

    name: str
    kind: str = ""
    values: list[Tensor] = field(default_factory=list[Tensor])


class Outputs:
    """Appends to `found` what is called from now on until `close`, in the order of the ends."""

    def __init__(self, root: LightningModule, module: str | None, found: list[Output]) -> None:
        """Begin.

        Args:
            root: What is trained.
            module: The module whose functions are followed, in its first call; None: follow the
                outputs of all modules. "" is the step itself.
            found: Where to put them.
        """
        self._found, self._mode = found, _Functions(found)
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
        self._leave()
        for hook in self._hooks:
            hook.remove()

    def _noting(self, name: str) -> Any:
        def note(part: nn.Module, _: Any, output: Any) -> None:
            kind = next(c for c in type(part).__mro__ if "fsdp" not in c.__module__).__name__
            self._found.append(Output(name, kind, whole_tensors(output)))

        return note

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

    def __init__(self, found: list[Output]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_of_user(sys._getframe(1)) and (values := whole_tensors(result)):
            self._found.append(Output(name_of(func), "", values))
        return result


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether a function is called by a module, and not by what shards its parameters."""
    while frame is not None and _name(frame) in _CARRIERS:
        frame = frame.f_back
    return frame is not None and not _name(frame).startswith(_INFRASTRUCTURE)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def whole_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in a value; all ranks must come here."""
    tensors = [x for x in leaves_of(value) if isinstance(x, Tensor)]
    numbers = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    whole = [gather(x.detach()).clone() for x in numbers]
    return whole if dist.get_rank() == 0 else [x[:0] if x.ndim else x for x in whole]
