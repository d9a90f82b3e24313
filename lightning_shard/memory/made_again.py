"""Notes which tensors cheap functions of torch made, so that they can be made again.

A pass over the memory of a device takes a thirtieth of the time of a copy over its link. So what an
activation, a norm or a concatenation made is not copied to the host where its operands are kept:
the same function is called again. It gives the same bits, by the same kernel of the same operands.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.domain.half import HALF
from lightning_shard.processes.torch_private.internals import (
    FakeTensor,
    base_of,
    key_of_storage,
    version_of,
)

Function = Callable[..., Any]
Arguments = Callable[..., tuple[Any, Any]]

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_CALLS = 8  # at most, to make a tensor again

_FUNCTIONS = """
    abs add avg_pool1d avg_pool2d avg_pool3d batch_norm bfloat16 cat celu clamp clone concat
    contiguous div double elu exp float gelu group_norm half hardsigmoid hardswish hardtanh
    instance_norm interpolate layer_norm leaky_relu log logsigmoid max_pool1d max_pool2d
    max_pool3d mish mul neg pow reciprocal relu relu6 rms_norm rsqrt selu sigmoid silu softplus
    softsign sqrt square sub tanh to
""".split()
_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add", "__sub__": "sub", "__isub__": "sub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul", "__truediv__": "div",
    "__itruediv__": "div", "__pow__": "pow", "__neg__": "neg", "__rsub__": "__rsub__",
    "__rtruediv__": "__rtruediv__",
}  # fmt: skip


def _cheap() -> dict[Function, Function]:
    """Give for each cheap function the one that makes its result anew, instead of in place."""
    found: dict[Function, Function] = {}
    for place in (torch, F, Tensor):
        for name in _FUNCTIONS:
            plain, in_place = (getattr(place, n, None) for n in (name, name + "_"))
            if callable(plain):  # not the dtype torch.half
                found[plain] = plain
            if in_place is not None:
                found[in_place] = plain or getattr(Tensor, name)
    return found | {getattr(Tensor, n): getattr(Tensor, plain) for n, plain in _OPERATORS.items()}


def _with_in_place(function: Function) -> dict[Function, Arguments]:
    """Give for a function with an argument `inplace`, its last one, the arguments without it."""
    names = [*inspect.signature(function).parameters] if inspect.isfunction(function) else []
    if "inplace" not in names:
        return {}
    place = names.index("inplace")

    def arguments(*args: Any, inplace: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        return args[:place], kwargs

    return {function: arguments}


def _of_batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,  # noqa: A002
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, Any]:  # fmt: skip
    """Leave out the averages of earlier batches, which have had their share."""
    averages = (None, None) if training else (running_mean, running_var)
    return (input, *averages, weight, bias, training, momentum, eps), {}


def _of_instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,  # noqa: A002
    bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, Any]:  # fmt: skip
    given = input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    return _of_batch_norm(*given)


_CHEAP = _cheap()
# the arguments with which a function writes into nothing that is given
_ARGUMENTS = {F.batch_norm: _of_batch_norm, F.instance_norm: _of_instance_norm}
for _function in {*_CHEAP.values()}:
    _ARGUMENTS |= _with_in_place(_function)


class Operand:
    """Describes an argument of a call: a part of the memory of a tensor, which it does not hold.

    Attributes:
        storage: The memory, while anybody holds it.
        version: The version of its numbers.
        made: The call that made them, where a cheap function made them.
    """

    __slots__ = ("dtype", "made", "offset", "shape", "storage", "strides", "version")

    def __init__(self, x: Tensor, made: "Made | None") -> None:
        """Hold what tells the part of the memory."""
        self.storage, self.version = weakref.ref(x.untyped_storage()), version_of(x)
        self.shape, self.strides, self.offset = x.shape, x.stride(), x.storage_offset()
        self.dtype, self.made = x.dtype, made

    def part_of(self, whole: Tensor) -> Tensor:
        """Return it as a view of a tensor in the same memory."""
        return whole.as_strided(self.shape, self.strides, self.offset)


class Made:
    """Describes the call of a cheap function that has filled the memory of a tensor.

    Attributes:
        calls: The calls that make it again, where none of the tensors between is kept.
        operands: The arguments that lie in the memory of others.
        version: The version of the numbers that it made.
        dtype: Their dtype.
    """

    __slots__ = ("_arguments", "_autocast", "_function", "_shape", "_strides", "calls", "dtype",
                 "operands", "version")  # fmt: skip

    def __init__(
        self, function: Function, args: list[Any], kwargs: dict[str, Any], result: Tensor,
        operands: Iterable[Operand],
    ) -> None:  # fmt: skip
        """Hold the call and the layout of what it made."""
        kind = result.device.type
        self._function, self._arguments = function, (args, kwargs)
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._shape, self._strides = result.shape, result.stride()
        self.operands = [*operands]
        self.version, self.dtype = version_of(result), result.dtype
        makers = [op for op in self.operands if op.made is not None]
        while (calls := 1 + sum(op.made.calls for op in makers if op.made)) > _CALLS:
            longest = max(makers, key=lambda op: op.made.calls if op.made else 0)
            makers.remove(longest)
            longest.made = None
        self.calls = calls

    def again(self, value: Callable[[Operand], Tensor]) -> Tensor:
        """Call the function again, without a graph."""
        args, kwargs = self._arguments
        args = [_swapped(x, Operand, value) for x in args]
        kwargs = {name: _swapped(x, Operand, value) for name, x in kwargs.items()}
        with torch.no_grad(), torch.autocast(*self._autocast, cache_enabled=False):
            result = self._function(*args, **kwargs)
        if (result.shape, result.dtype) != (self._shape, self.dtype):
            raise RuntimeError(
                f"{self._function} made {tuple(self._shape)} of {self.dtype} in forward and "
                f"{tuple(result.shape)} of {result.dtype} in backward, where activation_offload "
                "makes it again; leave autocast's rules as they are between both."
            )
        if result.stride() == self._strides:
            return result
        as_before = torch.empty_strided(
            self._shape, self._strides, dtype=result.dtype, device=result.device
        )
        return as_before.copy_(result)


class Makers:
    """Holds the calls that made the tensors of now.

    Args:
        holds: Returns True for a tensor whose memory may leave.
        small: Gives the bytes below which memory stays where it is.
    """

    def __init__(self, holds: Callable[[Tensor], bool], small: Callable[[], int]) -> None:
        """Know no call."""
        self._holds, self._small = holds, small
        self._made: dict[int, tuple[Any, Made]] = {}
        self._given: list[Tensor] = []  # to the function that runs under autocast

    def of(self, x: Tensor) -> Made | None:
        """Return the call that made the numbers of the memory of `x`."""
        _, made = self._made.get(key_of_storage(x.untyped_storage()), (None, None))
        is_it = made is not None and (made.version, made.dtype) == (version_of(x), x.dtype)
        return made if is_it else None

    def noted(self, function: Function, plain: Function, args: Any, kwargs: Any) -> Any:
        """Call a cheap function, and note that it made its result."""
        rule = _ARGUMENTS.get(plain)
        own, named = (args, kwargs) if rule is None else rule(*args, **kwargs)
        given = _tensors(own, named)
        is_served = all(type(x) in _PLAIN for x in given) and kwargs.get("out") is None
        if not (is_served and any(map(self._holds, given))):
            return function(*args, **kwargs)
        operands = {id(x): Operand(x, self.of(x)) for x in given if self._is_large(x)}
        result = self.called(function, args, kwargs)
        for x in given:  # a cast in the call may be what is saved of an operand
            if (operand := operands.get(id(x))) and operand.made is None:
                operand.made = self.of(x) if version_of(x) == operand.version else None
        if operands and self._is_noted(result, given, operands):
            self._note(result, plain, own, named, operands)
        return result

    def called(self, function: Function, args: Any, kwargs: Any) -> Any:
        """Call a function, whose operands autocast may cast."""
        if not torch.is_autocast_enabled(_kind_of_device()):
            return function(*args, **kwargs)
        before, self._given = self._given, _tensors(args, kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            self._given = before

    def see(self, saved: Tensor) -> None:
        """Note that autocast made a tensor that is saved, of an operand of the call that runs."""
        result = base_of(saved)
        node = result.grad_fn if self._given else None
        if node is None or node.name() != "ToCopyBackward0":
            return
        storage, source = result.untyped_storage(), node.next_functions[0]
        if any(type(x) not in _PLAIN or x.untyped_storage() is storage for x in self._given):
            return  # it was made before, and its operand may have been written since
        for x in self._given:
            if (x.grad_fn, x.output_nr) == source:
                self._note_cast(x, result)
                if x.dtype in HALF and self.of(x) is None:  # the way back loses nothing
                    self._note_cast(result, x)

    def _note_cast(self, x: Tensor, result: Tensor) -> None:
        operands = {id(x): Operand(x, self.of(x))} if self._is_large(x) else {}
        if operands and self._is_noted(result, [x], operands):
            self._note(result, Tensor.to, (x, result.dtype), {}, operands)

    def _is_large(self, x: Tensor) -> bool:
        """Return True for memory that may leave, and that a copy would take, too."""
        of_parameter = x.nbytes < self._small() and isinstance(base_of(x), nn.Parameter)
        return not of_parameter and x.untyped_storage().nbytes() >= self._small()

    def _is_noted(self, result: Any, given: list[Tensor], operands: dict[int, Operand]) -> bool:
        """Return True for a result that fills a memory of its own, or that of the first operand."""
        if not (isinstance(result, Tensor) and self._holds(result) and self._is_large(result)):
            return False
        storage = result.untyped_storage()
        fills = result.storage_offset() == 0 and storage.nbytes() == result.nbytes
        if not fills or result.is_conj() or result.is_neg():
            return False
        if any(x.is_conj() or x.is_neg() for x in given):
            return False
        same = [op for op in operands.values() if op.storage() is storage]
        was_written = all(op.version != version_of(result) for op in same)
        is_whole = all((op.shape, op.strides) == (result.shape, result.stride()) for op in same)
        return not same or (was_written and is_whole and len({x.dtype for x in given}) == 1)

    def _note(
        self, result: Tensor, plain: Function, args: Any, kwargs: Any, operands: dict[int, Operand]
    ) -> None:
        def kept(x: Tensor) -> Any:  # a copy of what is small, such as the weight of a norm
            return operands.get(id(x)) or x.detach().clone()

        args = [_swapped(x, Tensor, kept) for x in args]
        kwargs = {name: _swapped(x, Tensor, kept) for name, x in kwargs.items()}
        storage = result.untyped_storage()
        key = key_of_storage(storage)
        ended = weakref.ref(storage, lambda _: self._made.pop(key, None))
        self._made[key] = ended, Made(plain, args, kwargs, result, operands.values())


@functools.cache
def _kind_of_device() -> str:
    """Name the devices of this machine, as autocast does."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments and in lists of these."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += [y for y in x if isinstance(y, Tensor)]
    return found


def _swapped(x: Any, kind: type[Any], swap: Callable[[Any], Any]) -> Any:
    """Give another object for one of a kind, and for those in a list."""
    if isinstance(x, kind):
        return swap(x)
    if isinstance(x, list | tuple):
        return [swap(y) if isinstance(y, kind) else y for y in x]
    return x


class Noting(TorchFunctionMode):
    """While open, the calls of cheap functions are noted."""

    def __init__(self, makers: Makers) -> None:
        """Note them there."""
        super().__init__()
        self._makers = makers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        plain = _CHEAP.get(func)
        if plain is None:
            return self._makers.called(func, args, kwargs or {})
        return self._makers.noted(func, plain, args, kwargs or {})
