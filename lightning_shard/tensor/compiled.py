"""Compiles a block as one graph, forward and backward, with its collectives.

Dynamo does not look into the rules. It is given a function of local tensors, parameters and
buffers, which makes split tensors, calls the block and gives back local tensors; AOTAutograd runs
it on fake tensors and records what the rules do. All facts that the rules read, such as layouts,
are the same for all calls of one such function; torch.compile guards the rest: shapes of the parts,
dtypes, gradients. Blocks that differ in their parameters alone share a function.

A block that does not compile runs as it is, after one warning that says why. Ranks need not agree
on that, since the collectives are the same and come in the same order (see compiler.py, wire.py).
"""

import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.domain.layout import Layout
from lightning_shard.domain.subdomain import Domain, Subdomain
from lightning_shard.domain.tracing import is_traced, trace_begins, traced
from lightning_shard.processes.torch_private.internals import (
    DispatchMode,
    tree_flatten,
    tree_unflatten,
)
from lightning_shard.processes.torch_private.names import internal
from lightning_shard.tensor.compiler import inductor
from lightning_shard.tensor.gathering import gather_allowed
from lightning_shard.tensor.kind import kind_of
from lightning_shard.tensor.tensor import DomainTensor

LAYOUTS_PER_BLOCK = 16  # a network at several resolutions has some; each is compiled anew


@dataclass(frozen=True)
class _Split:
    """The place of a split tensor among arguments or results."""

    layout: Layout
    domain: Domain


@dataclass(frozen=True)
class _Plain:
    """The place of a plain tensor."""


@dataclass
class _Region:
    """A function of tensors, for blocks and arguments of one kind."""

    places: tuple[Any, ...]
    tree: Any
    call: Callable[..., Any] | None = None  # the compiled function
    block: "CompiledBlock | None" = None  # the one that runs now
    names: list[str] = field(default_factory=list[str])  # names of its parameters and buffers
    results: tuple[list[Any], Any] | None = None  # the places of the results, and their tree
    refused: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block on split tensors made of parts, and return the parts of its results."""
        assert self.block is not None
        trace_begins()
        given = iter(tensors)
        leaves = [_filled(place, given) for place in self.places]
        args, kwargs = tree_unflatten(leaves, self.tree)
        own = {f"block.{name}": next(given) for name in self.names}
        with _NoCollectives():
            found = torch.func.functional_call(_Caller(self.block), own, args, kwargs)
        leaves, tree = tree_flatten(found)
        self.results = [_place(leaf) for leaf in leaves], tree
        return tuple(_local(leaf) for leaf in leaves if isinstance(leaf, Tensor))


class _Caller(nn.Module):
    """Calls the forward of a block without its hooks, which run outside of what is compiled."""

    def __init__(self, compiled: "CompiledBlock") -> None:
        super().__init__()
        self.block, self.run = compiled.module, compiled.uncompiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _NoCollectives(DispatchMode):
    """Refuses collectives that a block calls itself: they would run while it is traced.

    Rules call functional ones, which are in the graph.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise UnsupportedOperationError(f"it calls torch.distributed itself ({func})")
        return func(*args, **(kwargs or {}))


_REGIONS: dict[Hashable, _Region] = {}
_LAYOUTS: Counter[Hashable] = Counter()  # regions by kind of block


class CompiledBlock:
    """The forward of a module, compiled as a whole where it is given split tensors.

    Args:
        module: The block.
        forward: The compiled code, for each kind of arguments. Its first call compiles, since a
            block that is recomputed in backward must compute as it did in forward.
        backend: The backend of torch.compile.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], backend: str = "inductor"
    ) -> None:
        self.module, self.uncompiled, self.backend = module, forward, backend
        self.of_plain_tensors = torch.compile(forward, backend=backend)

    def __reduce__(self) -> Any:
        """A copy of the module compiles anew: this is None in it."""
        return type(None), ()

    @functools.cached_property
    def holds_others(self) -> bool:
        """True if FSDP2 gathers parameters while the block runs, which no graph can hold."""
        inner = (m for m in self.module.modules() if m is not self.module)
        return any(isinstance(m, FSDPModule) for m in inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, DomainTensor) for leaf in leaves):
            return self.of_plain_tensors(*args, **kwargs)
        if self.holds_others or is_traced():  # traced: as a part of another block
            return self.uncompiled(*args, **kwargs)
        region = self._region(leaves, tree)
        if region is None or region.refused:
            return self.uncompiled(*args, **kwargs)
        if region.call is None:
            region.call = _compiled(region, self.backend)
        own = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        region.block, region.names = self, [*own]
        try:
            with traced():  # only what is traced sees it: what is compiled calls no rule
                tensors = [_local(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
                found = region.call(*tensors, *own.values())
        except internal("torch._dynamo.exc.TorchDynamoException") as error:
            region.refused = True
            _warn(self.module, error)
            return self.uncompiled(*args, **kwargs)
        finally:
            region.block = None
        return _results(region, found)

    def _region(self, leaves: Sequence[Any], tree: Any) -> _Region | None:
        """The function for these arguments; None where they are none for a graph."""
        places = tuple(map(_place, leaves))
        kind = kind_of(self.module)
        key = (kind, tree, places, _mode(), self.backend)
        try:
            found = _REGIONS.get(key)
        except TypeError:  # a constant that has no hash
            return None
        if found is None:
            _LAYOUTS[kind] += 1
            if _LAYOUTS[kind] == LAYOUTS_PER_BLOCK + 1:
                _warn(self.module, f"it was compiled for {LAYOUTS_PER_BLOCK} kinds of arguments")
            if _LAYOUTS[kind] > LAYOUTS_PER_BLOCK:
                return None
            found = _REGIONS[key] = _Region(places, tree)
        return found


def _compiled(region: _Region, backend: str) -> Callable[..., Any]:
    opaque = internal("torch._dynamo.nonstrict_trace")(region)

    def call(*tensors: Tensor) -> Any:
        return opaque(*tensors)

    # Dynamo counts compilations by code object
    own = types.FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)
    checked = inductor if backend == "inductor" else backend
    return torch.compile(own, fullgraph=True, dynamic=False, backend=checked)


def _place(leaf: Any) -> Any:
    if isinstance(leaf, DomainTensor):
        part = leaf.subdomain
        return _Split(part.layout, part.domain)
    return _Plain() if isinstance(leaf, Tensor) else leaf


def _local(leaf: Tensor) -> Tensor:
    return leaf.to_local() if isinstance(leaf, DomainTensor) else leaf


def _filled(place: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(place, _Split):
        return DomainTensor(Subdomain(next(tensors), place.layout, place.domain))
    return next(tensors) if isinstance(place, _Plain) else place


def _results(region: _Region, tensors: Sequence[Tensor]) -> Any:
    assert region.results is not None
    places, tree = region.results
    for x in tensors:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(_refuse_second_derivative)
    given = iter(tensors)
    return tree_unflatten([_filled(place, given) for place in places], tree)


def _refuse_second_derivative(_: Any) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedOperationError(
            "a compiled block has no second derivative (create_graph=True); train without "
            "compile_blocks"
        )


def _mode() -> Hashable:
    """Return the settings of torch and of this package that rules and blocks can read."""
    device = torch.accelerator.current_accelerator(check_available=True)
    types = ("cpu", device.type) if device is not None else ("cpu",)
    autocast = [torch.is_autocast_enabled(t) and torch.get_autocast_dtype(t) for t in types]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *grad, *autocast, gather_allowed.get()


def _warn(module: nn.Module, reason: str | BaseException) -> None:
    while isinstance(reason, BaseException) and (reason.__cause__ or reason.__context__):
        reason = reason.__cause__ or reason.__context__ or reason  # the error that torch wrapped
    lines = str(reason).strip().splitlines() or [type(reason).__name__]
    name = type(module).__name__
    warnings.warn(f"{name} runs uncompiled on split tensors: {lines[0]}", stacklevel=4)
