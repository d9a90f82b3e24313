"""The one table from torch function to rule.

A rule takes the function it stands for and that function's arguments, in which every domain tensor
is a `Subdomain`; it returns `Subdomain`s, or plain tensors where the result is the same on every
rank.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from lightning_shard.domain import Subdomain

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

_RULES: dict[Callable[..., Any], Rule] = {}
_LAZY_RULES: dict[Callable[..., Any], Rule] = {}
_OPERANDS: dict[Rule, tuple[tuple[int, str, bool], ...]] = {}
_LIMITS: dict[Callable[..., Any], str] = {}
_NUMPY_NAMES = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim"}
_WRAPPER: list[Callable[[Any], Any]] = []


class UnsupportedOperationError(NotImplementedError):
    """An operation, or this use of it, has no rule for tensors split over a domain mesh."""


def implements(*functions: Callable[..., Any], limits: str = "") -> Callable[[R], R]:
    """Register the decorated rule for `functions`; `limits` names the uses that it refuses.

    Raises:
        ValueError: A function has a rule already.
    """
    return functools.partial(_register, _RULES, functions, limits=limits)


def register_rule(*functions: Callable[..., Any], limits: str = "") -> Callable[[R], R]:
    """Teach split tensors a torch function: the public way to add a rule.

    The rule takes the function and its arguments, in which each split tensor is a `Subdomain`:
    `local` is this rank's part, `layout` says which dims are split (`layout.split_dims`), and
    `x.like(local)` wraps a result that is split in the same way. All ranks must make the same
    decisions.

    Args:
        functions: What users call, such as `torch.erfcx`; for a function of your own, one that
            calls `torch.overrides.handle_torch_function`.
        limits: The uses that the rule refuses, in a few words, for `python -m lightning_shard ops`.

    Raises:
        ValueError: A function has a rule already.

    Example:
        >>> @register_rule(torch.fake_quantize_per_tensor_affine)
        ... def quantize(func, x, scale, zero_point, quant_min, quant_max):
        ...     if not isinstance(scale, float):
        ...         raise UnsupportedOperationError("a scale that is a tensor")
        ...     return x.like(func(x.local, scale, zero_point, quant_min, quant_max))
    """
    return implements(*functions, limits=limits)


def implements_lazily(*functions: Callable[..., Any]) -> Callable[[R], R]:
    """Register a rule that takes lazy spectra as they are; without one they are read first."""
    return functools.partial(_register, _LAZY_RULES, functions)


def _register(
    table: dict[Callable[..., Any], Rule], functions: Iterable[Any], rule: R, limits: str = ""
) -> R:
    for function in dict.fromkeys(functions):
        if function in table:
            raise ValueError(
                f"{name_of(function)} already has the rule {name_of(table[function])}; "
                f"cannot register {name_of(rule)} for it too."
            )
        table[function] = rule
        if table is _RULES:
            _OPERANDS[rule] = _typed_operands(rule)
        if limits:
            _LIMITS[function] = limits
    return rule


def _typed_operands(rule: Rule) -> tuple[tuple[int, str, bool], ...]:
    """(position, name, whether split) of the arguments that the rule wants split, or plain."""
    parameters = list(inspect.signature(rule).parameters.values())[1:]
    typed = []
    for place, parameter in enumerate(parameters):
        kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (
            (Subdomain in kinds) != (Tensor in kinds)
        ):
            typed.append((place, parameter.name, Subdomain in kinds))
    return tuple(typed)


def check_operands(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse split tensors where the rule's annotations say `Tensor`, and plain ones the other way.

    Raises:
        UnsupportedOperationError: An operand is of the other kind; the message names it.
    """
    for place, name, split in _OPERANDS[rule]:
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor if split else Subdomain):
            raise UnsupportedOperationError(
                f"its operand {place + 1} ({name}) {'must' if split else 'must not'} be split"
            )


def rule_for(function: Callable[..., Any], *, lazy: bool = False) -> Rule | None:
    return (_LAZY_RULES if lazy else _RULES).get(function)


def limits_of(function: Callable[..., Any]) -> str:
    """The uses that the function's rule refuses; empty where it serves all."""
    return _LIMITS.get(function, "")


def functions_with_rules() -> dict[Callable[..., Any], Rule]:
    """A copy of the table."""
    return dict(_RULES)


def canonical_names(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments under torch's own names: numpy's `axis` is `dim`, its `keepdims` is `keepdim`.

    A tensor given as `input=` becomes the first positional argument.
    """
    if not kwargs:
        return args, kwargs
    if "out" in kwargs and kwargs["out"] is None:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


def set_wrapper(wrap: Callable[[Any], Any]) -> None:
    """Tell the rules how a `Subdomain` is shown to users; called once, by the tensor's module."""
    _WRAPPER[:] = [wrap]


def wrapped(value: Any) -> Any:
    """`value` as users see it: for the rules that call functions written for whole tensors."""
    return _WRAPPER[0](value)


def name_of(function: Any) -> str:
    """A readable name: `torch.conv2d`, `torch.nn.functional.pad`, `Tensor.add_`, `Tensor.shape`."""
    if isinstance(function, OpOverloadPacket | OpOverload):
        return f"torch.ops.{str(function).replace('::', '.')}"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function))
    if "boolean_dispatch" in name:  # F.max_pool2d and its like, which have no name of their own
        name = next((n for n, f in vars(F).items() if f is function), name)
    if name.startswith("getset_descriptor.") or name.endswith(".__get__"):
        attribute = getattr(function.__self__, "__name__", function.__self__)
        kind = {"__set__": " (assigned)", "__delete__": " (deleted)"}.get(name.rpartition(".")[2])
        return f"Tensor.{attribute}{kind or ''}"
    if name.startswith(("_TensorBase.", "TensorBase.", "method_descriptor.")):
        return f"Tensor.{name.split('.', 1)[1]}"
    if name.startswith("_VariableFunctionsClass."):
        return f"torch.{name.split('.', 1)[1]}"
    for group in ("fft", "linalg", "special"):
        if name.startswith(f"{group}_"):
            return f"torch.{group}.{name.removeprefix(group + '_')}"
    module = getattr(function, "__module__", None) or ""
    module = {
        "torch._C._nn": "torch.nn.functional",
        "torch.functional": "torch",
        "torch._tensor": "",
    }.get(module, module)
    return f"{module}.{name}" if module else name
