"""Recomputes the activations of blocks in backward, and compiles blocks.

Both change `forward` only. FSDP2's hooks, and those that take split tensors past them, stay
outside, so what is compiled or recomputed sees whole parameters. Names in the state dict stay.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_shard.processes.torch_private.internals import (
    DispatchMode,
    schema_of,
    tree_leaves,
    tree_map_only,
)
from lightning_shard.tensor.mixins import Mixin, mix_in
from lightning_shard.tensor.tensor import DomainTensor

_KEEPS = "_checkpoint_keeps"  # attribute of a module: operators
_COMPILED = "_compiled_by_lightning_shard"  # attribute of a module


class _Recomputed(Mixin):
    """Mixin of a module whose forward runs again in backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; backward runs it again."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        keeps = self.__dict__.get(_KEEPS, ())
        if keeps:
            kwargs["context_fn"] = functools.partial(_keeping, keeps)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


class _Only(DispatchMode):
    """Shows one of torch's modes some operators alone.

    Torch's count all operators, and raise where the repetition runs others: FSDP2's hooks do not
    gather again what is there, and rules have constants that they compute once. Operators that
    write into memory that is given to them run again, since a result that was kept would leave it
    empty: spectral transforms compute so.
    """

    def __init__(self, mode: Any, names: Sequence[str], *, copies: bool = False) -> None:
        super().__init__()
        self.mode, self.names, self.copies = mode, names, copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_named = str(func).removeprefix("aten.").split(".")[0] in self.names
        if not is_named or schema_of(func).is_mutable:
            return func(*args, **(kwargs or {}))
        result = self.mode.__torch_dispatch__(func, types, args, kwargs)
        if not self.copies:
            return result
        # the kept tensor stays as it is, whatever is added to the result in place
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}

        def copy(t: Tensor) -> Tensor:
            return t if t.untyped_storage().data_ptr() in given else t.clone()

        return tree_map_only(Tensor, copy, result)


def _keeping(names: Sequence[str]) -> tuple[_Only, _Only]:
    """Contexts of forward and of its repetition, in which the results of operators stay."""

    def keep(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts: Callable[..., Any] = create_selective_checkpoint_contexts
    forward, again = contexts(keep)
    return _Only(forward, names, copies=True), _Only(again, names)


def recompute(modules: Iterable[nn.Module], keeps: Sequence[str] = ()) -> None:
    """Keep only the inputs of these modules for backward, and run them again there.

    Args:
        modules: The modules, changed in place.
        keeps: Operators of aten whose results are kept, too, and not computed again.
    """
    for module in modules:
        mix_in(module, _Recomputed, **{_KEEPS: tuple(keeps)})


def keep_no_cache(root: nn.Module) -> None:
    """Switch off the caches of keys and values of transformers' models, with a warning.

    A cache that the first forward has filled is there when the block runs again, which then
    computes something else; torch reports this as a CheckpointError.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in root.modules()]
    caching: list[Any] = [c for c in configs if getattr(c, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    if caching:
        warnings.warn(
            "activation_checkpointing runs blocks again in backward, where a cache of keys and "
            "values would change their result; use_cache of the model's config is False from now "
            "on. generate() is not affected.",
            stacklevel=2,
        )


class _OfModule:
    """The compiled forward of one module."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.run = torch.compile(forward)

    def __reduce__(self) -> Any:
        """A copy of the module compiles anew: this is None in it."""
        return type(None), ()


class _Compiled(Mixin):
    """Mixin of a module whose forward is compiled; given split tensors it runs as it is.

    The compiler looks into no rule, and so could not tell when what a rule or the module reads has
    changed since it compiled.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled module, which is compiled at the first call."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if any(isinstance(leaf, DomainTensor) for leaf in tree_leaves((args, kwargs))):
            _say_uncompiled()
            return run(*args, **kwargs)
        state = self.__dict__
        if state.get(_COMPILED) is None:  # also of a copy of the module
            state[_COMPILED] = _OfModule(run)
        return state[_COMPILED].run(*args, **kwargs)


@functools.cache
def _say_uncompiled() -> None:
    """Warn once in a process."""
    warnings.warn(
        "compile_blocks compiles blocks that are given whole tensors; those that are given split "
        "ones run uncompiled.",
        stacklevel=4,
    )


def compile_forward(modules: Iterable[nn.Module]) -> None:
    """Compile the forward of these modules, inner ones apart, when it first runs."""
    for module in modules:
        mix_in(module, _Compiled)


def is_compiled(module: nn.Module) -> bool:
    """Return True for a module that `compile_forward` was given."""
    return isinstance(module, _Compiled)
