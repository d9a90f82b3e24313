"""Names the ranges that a profiler records: modules, functions on split tensors, collectives.

While the names are given, modules have hooks, and functions of torch.distributed and the dispatch
of split tensors are wrapped. Otherwise nothing of this is there, and costs nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from lightning_shard.ops import name_of, rule_for
from lightning_shard.processes.torch_private.typed import named_modules
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.profile.traffic import Traffic, counted

MODULE, FUNCTION, COLLECTIVE, WAIT = "module ", "split ", "collective ", "wait for a collective"


@contextlib.contextmanager
def labels(module: nn.Module, methods: Sequence[str] = ()) -> Generator[Traffic]:
    """Name what runs inside the block, and count what this rank sends.

    Args:
        module: Its submodules are named as in `named_modules`.
        methods: Methods of the module, whose calls are named, too.
    """
    with contextlib.ExitStack() as stack:
        _label_modules(module, stack)
        for name in methods:
            _replace(stack, module, name, _named(f"{MODULE}({name})", getattr(module, name)))
        _replace(stack, DomainTensor, "__torch_function__", _function())
        _replace(stack, dist.Work, "wait", _named(WAIT, dist.Work.wait))
        yield stack.enter_context(counted(_collective))


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, replacement)


def _named(label: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return plain(*args, **kwargs)

    return call


def _label_modules(module: nn.Module, stack: contextlib.ExitStack) -> None:
    entered: list[Any] = []

    def close_all() -> None:
        while entered:
            _leave(entered.pop())

    def name_it(name: str, part: nn.Module) -> None:
        def enter(*_: Any) -> None:
            entered.append(None if _in_graph() else record_function(MODULE + name).__enter__())

        def leave(*_: Any) -> None:
            if entered:
                _leave(entered.pop())

        # first and last: what FSDP2's own hooks do belongs to the module
        before = part.register_forward_pre_hook(enter, prepend=True)
        after = part.register_forward_hook(leave, always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)

    stack.callback(close_all)
    for name, part in named_modules(module):
        if part is not module:
            name_it(name, part)


def _leave(range_: Any) -> None:
    if range_ is not None:
        range_.__exit__(None, None, None)


def _in_graph() -> bool:
    """Return True while a compiler follows this call: its graph must not hold the profiler."""
    return torch.compiler.is_compiling()


def _function() -> Any:
    plain: Callable[..., Any] = DomainTensor.__torch_function__

    def call(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        label = None if _in_graph() else _label(func)
        if label is None:
            return plain(func, types, args, kwargs)
        with record_function(label):
            return plain(func, types, args, kwargs)

    return classmethod(call)


@functools.cache
def _label(func: Callable[..., Any]) -> str | None:
    """Return the name of a function that has a rule, with the theme of the rule; else None."""
    rule = rule_for(func)
    if rule is None:
        return None
    theme = rule.run.__module__.removeprefix("lightning_shard.ops.").split(".")[0]
    return f"{FUNCTION}{theme} {name_of(func)}"


def _collective(name: str, bytes_sent: int) -> Any:
    return record_function(f"{COLLECTIVE}{name} {bytes_sent}")
