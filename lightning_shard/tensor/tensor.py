"""A `DomainTensor` shows the global shape and holds this rank's part.

It is a `torch.Tensor` subclass without storage. Every function on it arrives at
`__torch_function__` and is served by its rule, on local tensors; autograd records only those. What
has no rule raises: nothing ever falls through to a kernel that would see a part and take it for the
whole.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_shard.domain.empty_ranks import replaying_views, written_alike
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.forward_mode import in_forward_mode, refuse_without_tangents
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops import rule_for
from lightning_shard.ops.become import BecameSplit
from lightning_shard.ops.elementwise.pointwise import pointwise
from lightning_shard.ops.elementwise.whole_gradients import as_part
from lightning_shard.ops.registry import Rule, canonical_names, changes_first, run_rule
from lightning_shard.ops.view.write_back import after_write, refuse_leaf, refuse_lost_write
from lightning_shard.processes.torch_private.internals import (
    ScriptMethod,
    accessors,
    copy_of_tensor,
    forbid_memory,
    frame_callback,
    in_transform,
    make_wrapper,
    untraced,
    without_rules,
)
from lightning_shard.tensor.calls import counted_calls, name_makers
from lightning_shard.tensor.facts import FACTS
from lightning_shard.tensor.gathering import (
    gather_allowed,
    on_whole_tensors,
    refusal,
    split_in,
    writes,
)
from lightning_shard.tensor.met import SplitInTransform, domains_met, note_domain
from lightning_shard.tensor.out import write_out
from lightning_shard.tensor.part import Part, part_of
from lightning_shard.tensor.rows import Rows, is_own_copy, remember_index
from lightning_shard.tensor.settle import read_only, unsettled
from lightning_shard.tensor.strangers import class_for
from lightning_shard.tensor.wrong_calls import NUMBERS, refuse_wrong_call

Function = Callable[..., Any]

_SET_REQUIRES_GRAD = accessors("requires_grad").__set__
_OF_THE_GRAPH = {Tensor.detach_, torch.detach_, Tensor.requires_grad_}  # they write no values
aten = torch.ops.aten
# words of the errors that torch raises where it has no tangent
_NO_TANGENT = ("forward AD", "forward grad", "forward mode AD", "jvp")

_NO_MEMORY = (
    "a tensor split over ranks has no memory of its own, as data_ptr(), to_dlpack() and "
    "`plain.data = tensor` need it; take lightning_shard.gather(tensor), or tensor.to_local(), "
    "which is this rank's part."
)
_WITHOUT_RULE: dict[Any, str] = {
    Tensor.storage_offset: "its parts have memory of their own. torch.func.linearize asks for it: "
    "take torch.func.jvp",
}


class DomainTensor(Tensor):
    """A tensor split over a domain mesh; made by `shard` and `from_local`.

    `shape`, `size()`, `numel()` are those of the global tensor; `to_local()` is this rank's part.
    """

    _part: Part

    @staticmethod
    def __new__(cls, part: Part, device: torch.device | None = None) -> "DomainTensor":
        # the wrapper requires grad too: a foreign autograd.Function then marks it, see `part_of`
        local = part.local
        if isinstance(part, Subdomain):
            part.check()
        wrapper: Any = make_wrapper(
            cls,
            part.shape,
            dtype=part.dtype,
            device=device or local.device,
            requires_grad=local.requires_grad,
        )
        wrapper._part = part
        forbid_memory(wrapper, _NO_MEMORY)
        if local.requires_grad and local.is_leaf:
            as_part(local)
        return wrapper

    def to_local(self) -> Tensor:
        """Return this rank's part: a plain tensor, connected to the autograd graph."""
        return as_part(self.subdomain.local)

    @property
    def subdomain(self) -> Subdomain:
        """This rank's part with its layout; a lazy spectrum is computed."""
        return part_of(self).read()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The order matters. Rows that a function writes are brought back by their own class.
        if Rows in types:
            return Rows.__torch_function__(func, types, args, kwargs)
        # before anything that the compiler could trace
        if frame_callback() is not None or torch.compiler.is_compiling():
            return _untraced(func, args, kwargs or {})
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Serve what autograd does with the wrappers of Functions, and `torch.tensor`."""
        if func is aten.detach.default:
            part = args[0]._part.read()
            return DomainTensor(part.view(part.local.detach(), part.layout, part.strides))
        if func is aten.detach_.default:
            return args[0]
        if func is aten.isnan.default:  # the anomaly mode looks for a NaN among gradients
            return args[0]._part.read().local.isnan()
        if func is copy_of_tensor:  # torch.tensor(x), which copies without a gradient
            part = args[0]._part.read()
            how = {name: value for name, value in (kwargs or {}).items() if value is not None}
            return DomainTensor(part.alike(copy_of_tensor(part.local.detach(), **how)))
        is_sum = func is aten.add.Tensor and not kwargs
        if is_sum and all(isinstance(a, DomainTensor) for a in args):
            return _wrap(pointwise(torch.add, *(a._part for a in args)), {})
        raise UnsupportedOperationError(
            f"{func} reached a tensor split over ranks without passing a rule, as inside of "
            "torch.func.vmap: call the function for each index and torch.stack what it returns. "
            "Or register a rule (lightning_shard.register_rule), or gather (lightning_shard.gather)"
            " first."
        )

    def __copy__(self) -> "DomainTensor":
        part = self.subdomain
        return self._like(part.view(copy.copy(part.local), part.layout, part.strides))

    def as_subclass(self, cls: Any) -> Any:
        """Return the same part under a class of another package, as torchvision's `Image`."""
        return DomainTensor.__new__(class_for(DomainTensor, cls), self.subdomain)

    def _like(self, part: Part) -> "DomainTensor":
        """Return another part under this tensor's class and attributes, see strangers.py."""
        made = DomainTensor.__new__(type(self), part)
        vars(made).update({k: v for k, v in vars(self).items() if k != "_part"})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "DomainTensor":
        """A copy of this rank's part; as in torch, only of a leaf."""
        part = self.subdomain
        copied = self._like(part.alike(part.local.__deepcopy__(memo)))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DomainTensor holds one rank's part and cannot be pickled; pickle "
            "lightning_shard.gather(tensor) instead."
        )


@untraced  # torch.compiler.disable, which would import the compiler here and now
def _untraced(func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Go on without a trace, where torch.compile looks: rules run as they are."""
    return _answer(func, args, kwargs)


def _answer(func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Serve a call by what the tensor knows of itself, or note it and serve it."""
    fact = FACTS.get(func)  # before rules, which need values: a shape is known without any
    if fact is not None:
        return fact(func, *args, **kwargs)
    if (calls := counted_calls.get()) is None:
        return _served(func, args, kwargs)
    name = calls.note(func, args, kwargs)
    result = _served(func, args, kwargs)
    if name:
        name_makers(split_in([result], DomainTensor), name)
    return result


def _served(func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    """Serve a call by a rule, or by `allow_gather`; a refusal tells the ways out."""
    try:
        return (_into_out if "out" in kwargs else _by_rule)(func, args, kwargs)
    except UnsupportedOperationError as error:
        if gather_allowed.get() and not writes(func, args, kwargs):
            return on_whole_tensors(func, args, kwargs, DomainTensor)
        if error.is_named:
            raise
        raise refusal(func, [args, kwargs], str(error), DomainTensor) from error
    except RuntimeError as error:  # NotImplementedError among them
        if not (in_forward_mode() and any(words in str(error) for words in _NO_TANGENT)):
            raise
        reason = (
            "it has no forward mode in torch; torch.autograd.functional.jvp, which differentiates "
            "backwards twice, may serve it"
        )
        raise refusal(func, [args, kwargs], reason, DomainTensor) from error


def _by_rule(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Unwrap the split tensors, run the rule, wrap its results."""
    rule, args, kwargs = checked_call(func, args, kwargs, DomainTensor)
    if rule is not None and rule.composes:
        return run_rule(rule, func, args, kwargs)
    wrappers: dict[int, DomainTensor] = {}
    local_args, local_kwargs = _unwrapped(args, kwargs, wrappers)
    if settled := unsettled(func, args, kwargs, wrappers.values()):
        for x in settled:
            x._part = x._part.settled()
        wrappers.clear()
        local_args, local_kwargs = _unwrapped(args, kwargs, wrappers)
    if domains_met.get():
        _note(wrappers)
    parts = [wrapper._part for wrapper in wrappers.values()]
    result = _wrap(on_parts(rule, func, local_args, local_kwargs, parts), wrappers)
    if func is Tensor.__setitem__ and isinstance(args[0], DomainTensor):
        _show_requires_grad(args[0])
    return result


def checked_call(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], kind: type[Tensor]
) -> tuple[Rule | None, tuple[Any, ...], dict[str, Any]]:
    """Find the rule of a call, let torch check the call, and give its arguments torch's names."""
    if in_transform():
        raise SplitInTransform
    refuse_without_tangents()
    rule = rule_for(func)
    if rule is None or rule.checked:
        refuse_wrong_call(func, args, kwargs, kind)
    if kwargs:
        args, kwargs = canonical_names(tuple(args), kwargs)
    return rule, tuple(args), kwargs


def on_parts(
    rule: Rule | None,
    func: Function,
    local_args: tuple[Any, ...],
    local_kwargs: dict[str, Any],
    parts: Sequence[Part],
) -> Any:
    """Run a rule on arguments with parts in the place of split tensors; return what it gives.

    Raises:
        UnsupportedOperationError: There is no rule, or it does not serve this call.
    """
    is_lazy = leaves_empty = False
    for part in parts:
        is_lazy = is_lazy or part.lazy
        layout = part.layout
        leaves_empty = leaves_empty or (
            layout.leaves_empty if layout is not None else not part.local.numel()
        )
    if is_lazy:
        lazy = rule_for(func, lazy=True)
        rule = lazy or rule
        if lazy is None:
            local_args = _read(local_args)
            local_kwargs = {k: _read(v) for k, v in local_kwargs.items()}
    if rule is None:
        without: Any = "it has no rule for split tensors"
        if isinstance(func, ScriptMethod):
            without = "TorchScript asks no rule; give the module as it was before torch.jit"
        elif getattr(func, "namespace", None) == "aten":  # OpOverload
            without = "operators have no rules; give the module as it was before torch.export"
        raise UnsupportedOperationError(_WITHOUT_RULE.get(func, without))
    writing = changes_first(func, local_args, local_kwargs)
    run = _run_and_write_back if writing else run_rule
    if leaves_empty:
        run = replaying_views(run)
    result = run(rule, func, local_args, local_kwargs)
    if func is Tensor.__getitem__:
        remember_index(local_args, result)
    return result


def _note(wrappers: dict[int, DomainTensor]) -> None:
    for wrapper in wrappers.values():
        if isinstance(wrapper._part, Subdomain):
            note_domain(wrapper._part.domain)
            return


def _run_and_write_back(
    rule: Rule, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a rule that writes into its first argument; what it is a copy of is written, too."""
    if func is Tensor.__setitem__ and is_own_copy(*args):
        return None
    target = args[0] if args else None
    if not isinstance(target, Subdomain):
        return run_rule(rule, func, args, kwargs)
    if target.copied and func in _OF_THE_GRAPH:
        raise UnsupportedOperationError("a copy of rows of another tensor has a graph of its own")
    refuse_lost_write(target)
    index = args[1] if func is Tensor.__setitem__ else ...
    result = written_alike(target, lambda: run_rule(rule, func, args, kwargs), index)
    after_write(target)
    return result


def _into_out(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out = kwargs["out"]
    if out is not None:
        refuse_wrong_call(func, args, kwargs, DomainTensor)
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    if out is None:
        return _by_rule(func, args, kwargs)
    split = next(split_in([args, kwargs], DomainTensor), None) is not None  # or only `out` is
    result = _by_rule(func, args, kwargs) if split else func(*args, **kwargs)
    return write_out(result, out, [args, kwargs], DomainTensor)


def _set_requires_grad(func: Function, *args: Any) -> Any:
    """Set `requires_grad` of the wrapper and of the part (see `DomainTensor.__new__`)."""
    with without_rules():
        func(*args)
    return _by_rule(func, args, {})


FACTS[_SET_REQUIRES_GRAD] = _set_requires_grad


def _reshaped(view: Function, func: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Change the shape in place: the same Python object holds what `view` gives from now on."""
    is_trained = tensor.is_leaf and tensor.requires_grad
    refuse_leaf(tensor.subdomain)
    if is_trained and tensor.grad is not None:
        raise UnsupportedOperationError(
            "a leaf that has a gradient cannot change its shape in place, since its gradient keeps "
            "the old one; set x.grad = None before"
        )
    made = view(tensor, *args, **kwargs)
    if is_trained:  # as under torch.no_grad() in torch, the tensor stays a leaf that is trained
        made = made.detach().requires_grad_()
    otherwise = "a tensor that autograd has saved cannot change its shape in place"
    return swapped(tensor, made, otherwise)


for _name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"):
    FACTS[getattr(Tensor, f"{_name}_")] = functools.partial(_reshaped, getattr(Tensor, _name))


def _refuse_memory(*_: Any) -> Any:
    raise UnsupportedOperationError(_NO_MEMORY)


# also within `allow_gather`: the memory of a gathered copy is gone, or a write into it is lost
for _function in ("data_ptr", "const_data_ptr", "is_set_to", "storage", "untyped_storage"):
    if hasattr(Tensor, _function):  # torch 2.11 lacks const_data_ptr
        FACTS[getattr(Tensor, _function)] = _refuse_memory


def _show_requires_grad(tensor: DomainTensor) -> None:
    """After a write in place the wrapper says what its part says, see `part_of`."""
    if isinstance(tensor._part, Subdomain):
        with without_rules():
            if tensor.grad_fn is None:
                tensor.requires_grad_(as_part(tensor._part.local).requires_grad)


def _read(value: Any) -> Any:
    """`value` with lazy parts read."""
    if type(value) in (list, tuple):
        return type(value)(map(_read, value))
    if isinstance(value, Subdomain | Tensor):
        return value
    return read_only(value.read()) if _is_part(value) else value


def _unwrapped(
    args: Sequence[Any], kwargs: dict[str, Any], wrappers: dict[int, DomainTensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    local_args = tuple([_unwrap(a, wrappers) for a in args])
    return local_args, {k: _unwrap(v, wrappers) for k, v in kwargs.items()} if kwargs else {}


def _unwrap(value: Any, wrappers: dict[int, DomainTensor]) -> Any:
    cls = type(value)
    if cls in NUMBERS:
        return value
    if isinstance(value, DomainTensor):
        part = part_of(value)
        wrappers[id(part.local)] = value
        return part
    if cls is not list and cls is not tuple:
        return value
    has_numbers = NUMBERS.issuperset(map(type, value))
    return cls(value if has_numbers else [_unwrap(v, wrappers) for v in value])


def _wrap(value: Any, wrappers: dict[int, DomainTensor]) -> Any:
    if isinstance(value, Subdomain):
        if value.copied and not value.layout.split_dims:
            return Rows.of(value)
        same = wrappers.get(id(value.local))
        if same is not None and not same._part.lazy and same._part.layout == value.layout:
            _show_requires_grad(same)
            return same  # an in-place operation gives back its tensor
        return DomainTensor(value)
    if value is None or isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple) or type(value).__module__ == "torch.return_types":
        return type(value)([_wrap(v, wrappers) for v in value])
    if isinstance(value, BecameSplit):
        otherwise = (
            "a plain tensor that autograd has saved cannot take split rows; make it like the split "
            "tensor (torch.zeros_like)"
        )
        return swapped(value.plain, DomainTensor(value.part), otherwise)
    return DomainTensor(value) if _is_part(value) else value


def _is_part(value: Any) -> TypeGuard[Part]:
    """Return whether a value is a `Part`; asking the protocol itself is slow."""
    return hasattr(type(value), "lazy")


def swapped(tensor: Tensor, made: Tensor, otherwise: str) -> Tensor:
    """Let the caller's tensor, the same Python object, be the one that was made from now on.

    Raises:
        UnsupportedOperationError: Something in torch holds the tensor; `otherwise` is the sentence.
    """
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError as error:
        raise UnsupportedOperationError(otherwise) from error
    return tensor
