"""Keeps the one table that leads from a torch function to its rule.

There are two kinds. A rule that `implements` a function is given its arguments with a `Subdomain`
in the place of every split tensor. A rule that `composes` a function out of other torch functions
is given the arguments as the user gave them. Both return `Subdomain`s or split tensors, or plain
tensors where the result is the same on every rank.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.narrow import is_sequence
from lightning_shard.processes.torch_private.internals import Operator, OperatorPacket

Function = Callable[..., Any]
R = TypeVar("R", bound=Function)


@dataclass(frozen=True, eq=False)
class Rule:
    """The function that replaces a torch function when it is called with split tensors.

    Attributes:
        run: Takes the torch function and the arguments of the call.
        composes: True if `run` takes the user's tensors, and not `Subdomain`s.
        checked: True if torch checks the call first, without memory (tensor/wrong_calls.py).
        limits: The uses that the rule refuses, in a few words.
        joins: True if it exchanges by functions of domain/comm.py alone, in forward and backward,
            so that the graphs of tiles may be one.
    """

    run: Function
    composes: bool = False
    checked: bool = True
    limits: str = ""
    joins: bool = False


_RULES: dict[Function, Rule] = {}
_OPERATORS: dict[str, Rule] = {}
_LAZY_RULES: dict[Function, Rule] = {}
_NUMPY_NAMES = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim"}


def implements(
    *functions: Function, limits: str = "", checked: bool = True, joins: bool = False
) -> Callable[[R], R]:
    """Register the decorated rule for `functions`; it is given `Subdomain`s.

    The annotations of the rule's parameters decide which operands it accepts. A parameter annotated
    with `Subdomain` and not with `Tensor` takes split tensors only, one annotated with `Tensor` and
    not with `Subdomain` takes plain tensors only; a call with the other kind is refused by the
    parameter's name. `Any`, and a union of both, take either.

    Args:
        functions: The functions that users call.
        limits: The uses that the rule refuses, in a few words, for `python -m lightning_shard ops`.
        checked: True if torch first checks the call. False is for rules that
            run the function itself on every rank's part, whatever the part, and for functions with
            effects of their own.
        joins: True if the rule exchanges by functions of domain/comm.py alone, and by none of them
            in an autograd.Function; then the graphs of tiles may be one.

    Raises:
        ValueError: A function has a rule already.
    """
    return functools.partial(
        _register, _RULES, functions, checked=checked, limits=limits, joins=joins
    )


def composes(*functions: Function, limits: str = "", checked: bool = True) -> Callable[[R], R]:
    """Register the decorated formula for `functions`; it is given the user's own tensors.

    The formula is written for whole tensors, out of functions that have rules. Its first argument
    is the torch function, like that of any rule.

    Args:
        functions: The functions that users call.
        limits: The uses that the formula refuses, in a few words.
        checked: True if torch first checks the call.

    Raises:
        ValueError: A function has a rule already.
    """
    return functools.partial(
        _register, _RULES, functions, composes=True, checked=checked, limits=limits
    )


def register_rule(*functions: Function, limits: str = "") -> Callable[[R], R]:
    """Teach split tensors a torch function: the public way to add a rule.

    The rule takes the function and its arguments, in which each split tensor is a `Subdomain`:
    `local` is this rank's part, `layout` says which dims are split (`layout.split_dims`), and
    `x.like(local)` wraps a result that is split in the same way. All ranks must make the same
    decisions. A result of other rows than its layout says ends in a RuntimeError.

    The annotations of the rule's parameters decide which operands it accepts: `Subdomain` takes
    split tensors only, `Tensor` takes plain tensors only, and no annotation takes both.

    Args:
        functions: The functions that users call, such as `torch.erfcx`; a function of your own
            calls `torch.overrides.handle_torch_function`.
        limits: The uses that the rule refuses, in a few words, for `python -m lightning_shard ops`.

    Raises:
        ValueError: A function has a rule already.
        TypeError: There is no function, or one of them is none, such as its name.

    Example:
        >>> @register_rule(torch.fake_quantize_per_tensor_affine)
        ... def quantize(func, x, scale, zero_point, quant_min, quant_max):
        ...     if not isinstance(scale, float):
        ...         raise UnsupportedOperationError("a scale that is a tensor")
        ...     return x.like(func(x.local, scale, zero_point, quant_min, quant_max))
    """
    if not functions or not all(callable(function) for function in functions):
        raise TypeError(
            "register_rule takes the functions that users call, such as torch.erfcx, and decorates "
            f"the rule: @register_rule(torch.erfcx); got {functions!r}."
        )

    def register(rule: R) -> R:
        if not callable(rule):
            raise TypeError(f"the rule of {name_of(functions[0])} is no function; got {rule!r}.")
        return implements(*functions, limits=limits, checked=False)(rule)

    return register


def implements_operator(name: str, limits: str = "") -> Callable[[R], R]:
    """Register a rule for an operator of another library, which may never be imported.

    Args:
        name: Such as `torchvision.nms` for `torch.ops.torchvision.nms`.
        limits: The uses that the rule refuses, in a few words.
    """

    def register(rule: R) -> R:
        _OPERATORS[name] = Rule(rule, checked=False, limits=limits)
        return rule

    return register


def implements_lazily(*functions: Function) -> Callable[[R], R]:
    """Register a rule that takes lazy spectra as they are; without one they are read first."""
    return functools.partial(_register, _LAZY_RULES, functions)


def _register(
    table: dict[Function, Rule], functions: tuple[Function, ...], rule: R, **facts: Any
) -> R:
    for function in dict.fromkeys(functions):
        if function in table:
            raise ValueError(
                f"{name_of(function)} already has the rule {name_of(table[function].run)}; "
                f"cannot register {name_of(rule)} for it too."
            )
        table[function] = Rule(rule, **facts)
    return rule


def rule_for(function: Function, *, lazy: bool = False) -> Rule | None:
    """Look up the rule of a torch function; None if it has none."""
    rule = (_LAZY_RULES if lazy else _RULES).get(function)
    if rule is None and isinstance(function, OperatorPacket) and not lazy:
        return _OPERATORS.get(str(function))
    return rule


def limits_of(function: Any) -> str:
    """Name the uses that the function's rule refuses; the text is empty where it serves all."""
    rule = rule_for(function) or _OPERATORS.get(function if isinstance(function, str) else "")
    return rule.limits if rule else ""


def functions_with_rules() -> dict[Any, Function]:
    """Every function of the table, with the code of its rule.

    An operator of a library that is not imported stands there by its name.
    """
    operators = {_operator(name): rule.run for name, rule in _OPERATORS.items()}
    return {function: rule.run for function, rule in _RULES.items()} | operators


def _operator(name: str) -> Any:
    library, _, short = name.partition(".")
    return getattr(getattr(torch.ops, library), short, name)


def run_rule(rule: Rule, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a rule with arguments that fit its parameters and their annotations.

    Raises:
        UnsupportedOperationError: The rule does not know these arguments.
    """
    misfit, typed = _binding(rule, len(args), tuple(kwargs))
    if misfit:
        raise UnsupportedOperationError(f"its rule does not know this use of it: {misfit}")
    for place, name, split in typed:
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor if split else Subdomain):
            raise UnsupportedOperationError(
                f"its operand {place + 1} ({name}) {'must' if split else 'must not'} be split"
            )
    return rule.run(func, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _binding(
    rule: Rule, count: int, names: tuple[str, ...]
) -> tuple[str, tuple[tuple[int, str, bool], ...]]:
    """Bind the rule's parameters to a call with `count` arguments and these names.

    Returns:
        Why the rule cannot be called so, or nothing; and (position, name, whether split) of the
        arguments that it wants split, or plain.
    """
    signature = inspect.signature(rule.run)
    try:
        signature.bind(None, *[None] * count, **dict.fromkeys(names))
    except TypeError as error:
        return str(error), ()
    parameters = [] if rule.composes else list(signature.parameters.values())[1:]
    typed: list[tuple[int, str, bool]] = []
    for place, parameter in enumerate(parameters):
        kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (
            (Subdomain in kinds) != (Tensor in kinds)
        ):
            typed.append((place, parameter.name, Subdomain in kinds))
    return "", tuple(typed)


def canonical_names(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the arguments torch's own names: numpy's `axis` is `dim`, its `keepdims` `keepdim`.

    A tensor given as `input=` becomes the first positional argument.
    """
    kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and "condition" not in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


def without_deprecated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loss but those that `reduction` replaces, which it refuses."""
    deprecated = ("size_average", "reduce")
    if any(given.get(name) is not None for name in deprecated):
        raise UnsupportedOperationError(
            "the deprecated arguments size_average and reduce; use reduction"
        )
    return {name: value for name, value in given.items() if name not in deprecated}


_IN_PLACE = re.compile(
    r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_"
)


@functools.lru_cache(maxsize=4096)
def is_in_place(function: Any) -> bool:
    """Return True for functions named as those that change their first operand: `add_`, `+=`."""
    return bool(_IN_PLACE.fullmatch(getattr(function, "__name__", "")))


def changes_first(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return True for a call that changes its first operand, also by `x[i] = y`, `inplace=True`."""
    always, place = _ways_to_write(function)
    given = len(args) > place >= 0 and args[place]
    return always or bool(given or kwargs.get("inplace"))


@functools.lru_cache(maxsize=4096)
def _ways_to_write(function: Callable[..., Any]) -> tuple[bool, int]:
    """Return whether a function is named as in place, and where it takes `inplace`, or -1."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # a function of C++ tells no signature
        names = []
    writes = is_in_place(function) or function is Tensor.__setitem__
    return writes, names.index("inplace") if "inplace" in names else -1


def listed(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a call `f(a, b)`, or those of the one list in `f([a, b])`."""
    return values[0] if len(values) == 1 and is_sequence(values[0]) else values


def name_of(function: Any) -> str:
    """Make a readable name: `torch.conv2d`, `torch.nn.functional.pad`, `Tensor.add_`."""
    if isinstance(function, (OperatorPacket, Operator, str)):
        return f"torch.ops.{str(function).replace('::', '.')}"
    names = (getattr(function, key, None) for key in ("__qualname__", "__name__", "name"))
    name = next((name for name in names if isinstance(name, str)), repr(function))
    if "boolean_dispatch" in name:  # F.max_pool2d and its like, which have no name of their own
        name = next((n for o in (F, torch) for n, f in vars(o).items() if f is function), name)
    if name.startswith("getset_descriptor.") or name.endswith(".__get__"):
        attribute = getattr(function.__self__, "__name__", function.__self__)
        kind = {"__set__": " (assigned)", "__delete__": " (deleted)"}.get(name.rpartition(".")[2])
        return f"Tensor.{attribute}{kind or ''}"
    if name.startswith(("_TensorBase.", "TensorBase.", "method_descriptor.")):
        return f"Tensor.{name.split('.', 1)[1]}"
    if name.startswith("_VariableFunctionsClass."):
        return f"torch.{name.split('.', 1)[1]}"
    for group in ("fft", "linalg", "special", "sparse"):
        if name.startswith((f"{group}_", f"_{group}_")):
            return f"torch.{group}.{name.removeprefix('_').removeprefix(group + '_')}"
    module = getattr(function, "__module__", None) or ""
    module = {
        "torch._C._nn": "torch.nn.functional",
        "torch.functional": "torch",
        "torch._tensor": "",
        "lightning_shard.points.neighbours": "lightning_shard",
        "lightning_shard.tensor.placement": "lightning_shard",
    }.get(module, module)
    return f"{module}.{name}" if module else name
