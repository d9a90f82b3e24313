"""Elementwise functions: every rank computes its own part; nothing moves.

The family is discovered: all of torch's functions whose ATen operator carries the pointwise tag, as
`torch.f`, `Tensor.f`, `Tensor.f_`, `F.f` and `torch.special.f`, with the operators of `Tensor`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.align import all_in_rows, common_layout, local_part
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.strides import Strides, in_format, of_result
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.become import BecameSplit, become_split, made_from_split
from lightning_shard.ops.registry import implements, is_in_place, listed, rule_for
from lightning_shard.processes.device import DEVICES
from lightning_shard.processes.torch_private.internals import (
    OperatorPacket,
    accessors,
    functions_of_cpp,
    schemas,
)

OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv "
    "floordiv rfloordiv ifloordiv mod rmod imod pow rpow ipow neg pos abs invert and rand "
    "iand or ror ior xor rxor ixor lt le gt ge eq ne lshift rshift ilshift irshift"
).split()
# aliases and composites of pointwise operators, which carry no tag of their own
UNTAGGED = (
    "absolute negative multiply subtract divide floor_divide fix greater greater_equal less "
    "less_equal not_equal arccos arccosh arcsin arcsinh arctan arctan2 arctanh conj real imag "
    "isreal float_power isclose expit gammaln gammainc gammaincc multigammaln ndtr psi "
    "softsign tanhshrink logsigmoid sigmoid tanh hardswish polar complex "
    # tagged since later versions than torch 2.11
    "relu relu6 elu selu celu leaky_relu hardtanh hardsigmoid hardshrink softshrink softplus silu "
    "mish gelu threshold"
).split()
CONVERSIONS = [row.type for row in DEVICES] + (
    "to type type_as float double half bfloat16 chalf cfloat cdouble bool int long short char "
    "byte clone detach detach_ contiguous requires_grad_ resolve_conj "
    "resolve_neg fill_ zero_ zeros_like ones_like full_like empty_like nan_to_num nan_to_num_"
).split()
VIEWS = {
    torch.detach, Tensor.detach, accessors("data").__get__, torch.real, accessors("real").__get__,
    torch.imag, accessors("imag").__get__, torch.conj, Tensor.conj,
}  # fmt: skip
_OPERANDS = (Subdomain, Tensor)  # a tuple: a union would be made anew in each call
# their results lie row by row, however their operands lie
IN_ROWS = "masked_fill log_sigmoid logsigmoid mvlgamma multigammaln"
# they exchange their operands before the result is laid in memory as these are
EXCHANGING = "rsub __rsub__ __rdiv__ __rtruediv__ __rfloordiv__ __rmod__ __rpow__"
NOT_POINTWISE_IN_ALL_FORMS = {"max", "min", "equal", "rrelu"}


def _named(names: set[str], *owners: Any) -> list[Callable[..., Any]]:
    found = {getattr(owner, name, None) for name in names for owner in owners}
    return [f for f in found if callable(f) and not isinstance(f, type)]


def _tagged_names() -> set[str]:
    # all of them: dir(torch.ops.aten) lists only the operators that something has used already
    named = (schema.name for schema in schemas())
    aten = {name.removeprefix("aten::") for name in named if name.startswith("aten::")}
    names: set[str] = set()
    for name in aten:
        packet: Any = getattr(torch.ops.aten, name, None)
        overloads: list[str] = packet.overloads() if isinstance(packet, OperatorPacket) else []
        if any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads):
            names.add(name.removeprefix("special_"))
    return names - NOT_POINTWISE_IN_ALL_FORMS


def _pointwise_functions() -> list[Callable[..., Any]]:
    names = _tagged_names() | set(UNTAGGED)
    names |= {f"{name}_" for name in names}
    operators = _named({f"__{name}__" for name in OPERATORS}, Tensor)
    getters = [accessors("real").__get__, accessors("imag").__get__]
    functions = _named(names, torch, Tensor, torch.special, F, functions_of_cpp)
    conversions = set(_named(set(CONVERSIONS), torch, Tensor))
    return [f for f in {*functions, *operators, *getters} if f not in conversions]


_IN_ROWS = {*_named({*IN_ROWS.split()}, torch, Tensor, torch.special, F, functions_of_cpp)}
_EXCHANGING = {*_named({*EXCHANGING.split()}, torch, Tensor)}
_ANGLES = {torch.angle, Tensor.angle}  # those of complex numbers lie row by row


@implements(*_pointwise_functions(), checked=False)
def pointwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Broadcast the layouts, then compute on the local parts."""
    if func is torch.where and len(args) + len(kwargs) < 3:
        places = rule_for(torch.nonzero)
        assert places is not None
        return places.run(torch.nonzero, *args, **kwargs, as_tuple=True)
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, _OPERANDS)]
    split = [o for o in operands if isinstance(o, Subdomain)]
    first = split[0]
    layout = first.layout if len(operands) == 1 else common_layout(operands)
    if is_in_place(func):
        if not isinstance(args[0], Subdomain) and layout.shape == args[0].shape:
            return become_split(
                args[0],
                first.like(args[0], layout),
                lambda part: pointwise(func, part, *args[1:], **kwargs),
            )
        _refuse_in_place(args[0], layout)

    given = [local_part(a, layout) if isinstance(a, _OPERANDS) else a for a in args]
    named = {
        name: local_part(a, layout) if isinstance(a, _OPERANDS) else a for name, a in kwargs.items()
    }
    result = func(*given, **named)
    if func in VIEWS:
        return first.view(result, layout, _strides_of_view(first, result))
    strides = _strides_of_result(func, args, operands, layout)
    if isinstance(result, tuple):
        return tuple(Subdomain(r, layout, first.domain, None, strides) for r in result)
    if not isinstance(result, Tensor):  # NotImplemented, for an operand that it does not know
        return result
    return Subdomain(result, layout, first.domain, None, strides)


def _strides_of_result(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    operands: Sequence[Subdomain | Tensor],
    layout: Layout,
) -> Strides | None:
    """Strides of the whole result; None where nobody knows them of one of the operands."""
    if all_in_rows(operands):
        return layout.strides
    if func is Tensor.where:  # torch asks the condition first
        operands = [operands[1], operands[0], *operands[2:]]
    known: list[tuple[tuple[int, ...], Strides]] = []
    brought = False  # rows that travelled lie in an order of their own
    for x in operands:
        strides = x.stride() if isinstance(x, Tensor) else x.strides
        if strides is None:
            return None
        if isinstance(x, Subdomain) or x.ndim:
            known.append((tuple(x.shape), strides))
        brought = brought or (isinstance(x, Subdomain) and x.layout != layout)
    if func in _IN_ROWS or (func in _ANGLES and operands[0].dtype.is_complex):
        return layout.strides
    if brought or func in _EXCHANGING or (args and not isinstance(args[0], _OPERANDS)):
        return None
    return of_result(*known)


def _strides_of_view(x: Subdomain, view: Tensor) -> Strides | None:
    is_half = x.dtype.is_complex and not view.is_complex()  # real or imaginary parts
    return x.strides if x.strides is None or not is_half else tuple([2 * n for n in x.strides])


def elementwise(func: Callable[..., Any], *operands: Subdomain | Tensor) -> Any:
    """`func` of operands among which there may be no split one."""
    split = any(isinstance(o, Subdomain) for o in operands)
    return pointwise(func, *operands) if split else func(*operands)


@implements(*_named(set(CONVERSIONS), torch, Tensor), accessors("data").__get__, checked=False)
def convert(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype, device or content and keep the layout; a second tensor lends its dtype."""
    args = tuple(a.local if isinstance(a, Subdomain) else a for a in args)
    if not isinstance(x, Subdomain):
        return func(x, *args, **kwargs)
    result = func(x.local, *args, **kwargs)
    if func in VIEWS:
        # a write into it has no graph
        return x.copy(result, x.layout, x.strides, moved=x.copied is not None)
    asked = kwargs.get("memory_format", args[0] if func is Tensor.contiguous and args else None)
    if func is Tensor.contiguous and asked is None:
        asked = torch.contiguous_format
    if not isinstance(result, Tensor):  # the name of type()
        return result
    if asked in (None, torch.preserve_format):
        return x if result is x.local else x.alike(result)
    is_contiguous = func is Tensor.contiguous
    if result is x.local and not is_contiguous and x.strides and x.memory_format == asked:
        return x  # as torch's `to`, which tells channels_last alone from other orders
    is_perhaps_same = result is x.local or is_contiguous
    copies, strides = in_format(x.shape, x.strides or x.layout.strides, asked)
    if is_perhaps_same and x.strides is not None and not copies:
        return x
    if result is x.local:  # a part of one row lies so, where the whole does not
        result = result.clone(memory_format=asked)
    if is_perhaps_same and x.strides is None:  # nobody knows whether torch's result is a copy
        return x.copy(result, x.layout, strides, is_view=False)
    return Subdomain(result, x.layout, x.domain, None, strides)


@implements(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor)
def new_plain(
    func: Callable[..., Any], x: Subdomain | Tensor, *args: Any, **kwargs: Any
) -> Subdomain | Tensor:
    """Make a tensor that is whole on every rank, or split where it has room for the rows of `x`.

    `x.new_tensor(y)` of a split `y` is a copy of its values, as in torch.
    """
    data = args[0] if args else kwargs.get("data")
    if func is Tensor.new_tensor and isinstance(data, Subdomain):
        like = x.local if isinstance(x, Subdomain) else x
        made = (
            data.local.detach()
            .clone()
            .to(device=kwargs.get("device") or like.device, dtype=kwargs.get("dtype") or like.dtype)
        )
        return data.like(made.requires_grad_(kwargs.get("requires_grad", False)))
    assert isinstance(x, Subdomain)
    if func is not Tensor.new_tensor:
        size = kwargs.pop("size", None)
        filled = func is Tensor.new_full
        if size is None:
            size, args = (args[0], args[1:]) if filled else (listed(args), ())
        layout = _with_room_for(x, size)
        size = layout.local_shape if layout else size
        made = func(x.local, size, *args, **kwargs)
        return x.like(made, layout) if layout else made_from_split(made)
    return made_from_split(func(x.local, *args, **kwargs))


def _with_room_for(x: Subdomain, size: Any) -> Layout | None:
    """Choose the split of new memory for images of the extents of `x`, or larger ones.

    As in `batch = image.new_full((B, C, H, W), 0); batch[0, :, :h, :w].copy_(image)`. Its last dims
    are those of `x`. None for memory of another kind, such as a kernel: one dim alone that is as
    long or longer says too little, so that it and the first must be equal.
    """
    if isinstance(size, int) or min(len(size), x.ndim) < 3 or not x.layout.split_dims:
        return None
    after = x.ndim - min(x.layout.split_dims)  # dims from the first split one on
    if after >= len(size) or after >= x.ndim:
        return None
    if any(size[-d] < x.shape[-d] for d in range(1, after + 1)):
        return None
    if after == 1 and (size[0], size[-1]) != (x.shape[0], x.shape[-1]):
        return None
    splits = {d - x.ndim + len(size): x.layout.axes(d) for d in x.layout.split_dims}
    return Layout.of([int(n) for n in size], splits, x.layout.grid)


@implements(Tensor.copy_)
def copy(
    func: Callable[..., Any], x: Any, source: Any, *args: Any, **kwargs: Any
) -> Subdomain | BecameSplit | Tensor:
    """Copy the rows that this rank holds."""
    if not isinstance(source, Subdomain | Tensor):
        return x.like(func(x.local, source))
    layout = common_layout([x, source])
    if isinstance(source, Subdomain) and not isinstance(x, Subdomain) and layout.shape == x.shape:
        return become_split(x, source.like(x, layout), lambda part: copy(func, part, source))
    _refuse_in_place(x, layout)
    return x.like(func(x.local, local_part(source, layout), *args, **kwargs))


def _refuse_in_place(target: Any, result: Any) -> None:
    if not isinstance(target, Subdomain) or target.layout != result:
        raise UnsupportedOperationError(
            "an in-place operation cannot change how its tensor is split: the tensor is "
            f"{target.layout if isinstance(target, Subdomain) else 'whole on every rank'}, the "
            f"result is {result}"
        )
