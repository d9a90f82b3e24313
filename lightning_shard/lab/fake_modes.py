"""Runs the operations of a step on fake tensors, or on real ones, and counts each in a ledger.

A fake tensor has no numbers. Integers stay real where nothing fake went into them, since sizes and
indices are computed with them.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_shard.lab.known_numbers import known_number, learn
from lightning_shard.lab.timeline import Ledger
from lightning_shard.processes.torch_private.internals import (
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    own_buffers,
    own_parameters,
    tree_leaves,
)
from lightning_shard.tensor.tensor import DomainTensor

_aten: Any = torch.ops.aten
_ITEM = "aten::_local_scalar_dense"
_WHOLE_NUMBERS = (_aten.arange, _aten.randperm, _aten.scalar_tensor)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NUMBER, OTHER_NUMBER = 1, 3  # for the two traces of a step that reads numbers
COLLECT_EVERY = 64  # operations


class IntegersStay(TorchFunctionMode):
    """Lets deep copies of integers be real, such as those of counters of steps, while open."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        if func is Tensor.__deepcopy__ and args[0].dtype in _INTEGERS:
            x, memo = args
            return memo.setdefault(id(x), torch.empty_like(x).copy_(x))  # clones would be fake
        return func(*args, **(kwargs or {}))


def as_fake(x: Any) -> Any:
    """Return an empty tensor for one of numbers; others as they are."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


class Real(DispatchMode):
    """Counts operations on real tensors."""

    is_in_step = reads_numbers = False

    def __init__(self, ledger: Ledger) -> None:
        """Count in a ledger."""
        super().__init__()
        self._ledger = ledger

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DomainTensor | DTensor) for x in given):
            return NotImplemented  # the wrapper calls operations on what it holds
        out = func(*args, **kwargs)
        _note(self._ledger, func, args, kwargs, given, out)
        return out


class Fake(FakeTensorMode):
    """Makes fake tensors; DTensor enters it again, to compute shapes that no rank holds.

    Attributes:
        optimizers: The optimizers of the training.
        is_in_step: True while the module, a hook or an optimizer may read numbers.
        reads_numbers: True once a step has read a number that is not known.
    """

    def __init__(self, ledger: Ledger, number: int) -> None:
        """Count in a ledger; `number` stands for what a step reads of a fake tensor."""
        super().__init__(allow_non_fake_inputs=True)
        self.optimizers: Sequence[Any] = ()
        self.is_in_step = self.reads_numbers = False
        self._ledger, self._number, self._depth = ledger, number, 0

    def __deepcopy__(self, memo: Any) -> Any:
        """Copies of fake tensors are of this mode.

        A copy of it would have weak references to the same memory, and each of them frees it
        (torch 2.15): a step that logs made such copies, and the heap was damaged.
        """
        return self

    def __enter__(self) -> Any:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._depth -= 1
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth > 1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in given):
            if func.name() == _ITEM:
                self._ledger.synchronize()
                return self._read(given[0])
            if func is _aten.equal.default:
                return True
            if func is _aten.bincount.default and (count := _bins(args, kwargs)):
                kind = given[-1].dtype if len(given) > 1 else torch.int64  # that of its weights
                out = given[-1].new_empty(count, dtype=kind)
                _note(self._ledger, func, args, kwargs, given, out)
                return out
        elif _is_of_integers(func, given, leaves, kwargs.get("dtype")):
            return func(*args, **kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except ValueError as error:
            if func is _aten.view.default:  # real tensors refuse it with this type of error
                raise RuntimeError(str(error)) from error
            raise
        learn(func, args, given, out)
        if isinstance(out, FakeTensor):
            out.constant = None  # a real tensor, of which no deep copy can be made here
        if func.namespace != "prim":
            _note(self._ledger, func, args, kwargs, given, out)
        return out

    def _read(self, x: Tensor) -> float | int | bool:
        """Return a number for an element of a fake tensor."""
        number = known_number(x)
        if number is None:
            is_needed = self.is_in_step and not self._counts_updates(x)
            self.reads_numbers = self.reads_numbers or is_needed
            number = self._number if is_needed else NUMBER
        if x.dtype is torch.bool:
            return number == NUMBER
        return float(number) if x.is_floating_point() else int(number)

    def _counts_updates(self, x: Tensor) -> bool:
        """Return whether an optimizer of torch counts its updates by this tensor."""
        states: Any = (state for o in self.optimizers for state in o.state.values())
        counts = (state.get("step") for state in states if isinstance(state, dict))
        return x.ndim == 0 and any(count is x for count in counts)


def _note(ledger: Ledger, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
    if any(map(_holds_nothing, [*given, *tree_leaves(out)])):
        return
    ledger.note(func, args, kwargs, given, out)
    if ledger.operations % COLLECT_EVERY == 0:
        gc.collect(0)


def _bins(args: Any, kwargs: Any) -> int:
    """Return as how many numbers `bincount` counts; 0 if that depends on the numbers."""
    return int(kwargs.get("minlength", args[2] if len(args) > 2 else 0))


def _is_of_integers(func: Any, given: list[Tensor], leaves: list[Any], dtype: Any) -> bool:
    if given:
        return all(x.dtype in _INTEGERS for x in given) and dtype in (None, *_INTEGERS)
    if dtype is None:
        return func.overloadpacket in _WHOLE_NUMBERS and not any(
            isinstance(x, float) for x in leaves
        )
    return dtype in _INTEGERS


def _holds_nothing(x: Any) -> bool:
    """Return whether `x` is a wrapper, whose part is counted by itself, or has a shape only."""
    return isinstance(x, DomainTensor | DTensor) or (isinstance(x, Tensor) and x.is_meta)


def apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Do `Module._apply` without a write into memory, which fake parameters do not have."""
    for module in self.modules() if recurse else (self,):
        for own in (own_parameters(module), own_buffers(module)):
            for name, old in [(name, x) for name, x in own.items() if x is not None]:
                new = change(old.detach())
                if (new.dtype, new.device) != (old.dtype, old.device):
                    is_parameter = isinstance(old, nn.Parameter)
                    made = nn.Parameter(new, old.requires_grad) if is_parameter else new
                    setattr(module, name, made)
    return self


def forgetting(mode: Any, swap: Callable[..., None]) -> Callable[..., None]:
    """Return a function that swaps tensors of a mode, which it remembers by weak references."""

    def swapping(one: Tensor, other: Tensor) -> None:
        known = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [key for key, x in known.items() if x is one or x is other]:
            del known[key]
        swap(one, other)

    return swapping
