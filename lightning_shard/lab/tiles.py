"""Runs a module on one device in tiles, which take turns: exact, for fields of any size."""

import copy
import math
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.data.split import ShardDims
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.domain.align import gathered
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.fsdp.options import bytes_of
from lightning_shard.fsdp.recompute import is_compiled
from lightning_shard.fsdp.split_inputs import split_inputs
from lightning_shard.lab.simulate import in_turns
from lightning_shard.lab.simulated.one_device import OneDevice
from lightning_shard.ops.elementwise.random import use_exact_random
from lightning_shard.processes.mesh import init_mesh, mesh_names
from lightning_shard.processes.torch_private.internals import DeviceContext, open_function_modes
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.random_state import random_state, set_random_state


@contextmanager
def in_tiles(
    module: nn.Module,
    tiles: int | str | Sequence[int],
    shard_dims: ShardDims = None,
    *,
    methods: Sequence[str] = ("forward",),
    device: torch.device | str | None = None,
    tile_memory: str | Path | None = None,
    tile_budget: str | None = None,
    exact_random: bool = True,
) -> Generator[None]:
    """Compute the calls of a module in tiles on one device, one after the other, exactly.

    Each tile is a rank of a domain, as in `split_inputs`; the ranks take turns in this process.
    While one computes, what the others hold lies in the host's memory. So the device holds the
    tensors of one operator of one tile, and the host about what the device would have held.
    Results are those of the whole field, up to rounding.

    The tensors of a call may lie on the host: each tile alone is moved to the device. Results lie
    where the tensors lay.

    Args:
        module: A network on the device, which is called without gradients.
        tiles: The number of tiles along the first spatial dim, or along each split dim, such as
            `(2, 4)`.
        shard_dims: The dims that are split; see `split_inputs`.
        methods: The methods that are computed so, such as "encode" and "decode".
        device: The device; by default that of the module's parameters.
        tile_memory: A directory in whose files waiting tiles lie, instead of the host's memory.
        tile_budget: Bytes that tiles may have on the device, such as "8GB": only what is above
            travels. By default all that a tile holds leaves when another one has its turn.
        exact_random: False lets each tile draw random numbers of its own, reproducibly, for tensors
            that are split. By default it draws those of the whole tensor, which are then on the
            device at once, and keeps its part; see `use_exact_random`.

    Raises:
        ValueError: `tiles` is no number from 1 on, or the module lacks a method, is compiled or has
            sharded parameters. A call in which no tensor is split raises it, too.
        RuntimeError: A call wants gradients, or is made by a rank of `simulate`.

    Example:
        >>> with torch.inference_mode(), in_tiles(network, 8):
        ...     volume = network(volume)  # on the host, as large as it is
    """
    sizes = sizes_of_tiles(tiles)
    _refuse(module)
    where = _device_of(module) if device is None else torch.device(device)
    budget = None if tile_budget is None else bytes_of(tile_budget, "tile_budget")
    OneDevice(where, folder=tile_memory)  # refuses a folder that is none
    plain = {name: _method(module, name) for name in methods}
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    calls: dict[str, Any] = {}

    def put(functions: dict[str, Any]) -> None:
        for name in methods:
            vars(module).pop(name, None)
            if name in functions:
                setattr(module, name, functions[name])

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} was called in tiles, which keep no gradients; call it within "
                "torch.inference_mode() or torch.no_grad()."
            )
        shared = OneDevice(where, budget, tile_memory)
        work = _Call(module, name, args, kwargs, sizes, shard_dims, where)
        put(before)
        try:
            with use_exact_random(exact_random):
                return work.run(shared)
        finally:
            put(calls)

    for name, method in plain.items():
        calls[name] = wraps(method)(partial(call, name))
    put(calls)
    try:
        yield
    finally:
        put(before)


def refuse_to_offload(activation_offload: object) -> None:
    """Refuse what would move tensors that tiles move already.

    Raises:
        ValueError: Activations are offloaded.
    """
    if activation_offload:
        raise ValueError(
            "activation_offload moves what tiles move already; leave it out, and give tile_budget, "
            'such as "8GB", to keep so much of it on the device.'
        )


def sizes_of_tiles(tiles: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return the number of tiles along each split dim, also of "2x4".

    Raises:
        ValueError: They are no whole numbers from 1 on.
    """
    given: Any = tiles
    if isinstance(given, str) and re.fullmatch(r"\d+(x\d+)*", given):
        given = [int(size) for size in given.split("x")]
    is_many = isinstance(given, Sequence) and not isinstance(given, str)
    sizes = tuple[Any, ...](given if is_many else (given,))
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(
            f"tiles must be a number from 1 on, or one for each split dim, such as (2, 4); got "
            f"{tiles!r}."
        )
    return sizes


def _refuse(module: nn.Module) -> None:
    """Refuse what hides its operators from the pager, or whose parameters are of other ranks."""
    for part in module.modules():
        # torch.compile(module) and module.compile() leave these
        marks = [getattr(part, name, None) for name in ("_orig_mod", "_compiled_call_impl")]
        if any(marks) or isinstance(part, torch.jit.ScriptModule) or is_compiled(part):
            raise ValueError(
                f"in_tiles must see each operator of {type(module).__name__}, but compiled code "
                f"hides those of its {type(part).__name__}; give the network as it is before "
                "torch.compile, torch.jit or compile_blocks."
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"in_tiles needs whole parameters, but {name!r} is sharded over processes; give "
                "the network as it is before parallelize or fully_shard."
            )


def _device_of(module: nn.Module) -> torch.device:
    tensors = (*module.parameters(), *module.buffers())
    return next((x.device for x in tensors), torch.device("cpu"))


def _method(module: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}; name one that it has.")
    return method


def in_modes_of_caller(
    body: Callable[[], Any], device: torch.device, *, gradients: bool = True
) -> Callable[[], Any]:
    """Return the body of a rank under the modes of the caller, which each thread has anew.

    Args:
        body: The function that a rank runs.
        device: The device of the ranks.
        gradients: True if the body may compute gradients; otherwise inference mode goes on as well.

    Raises:
        RuntimeError: A mode is open that a thread cannot be given.
    """
    mode = next((x for x in open_function_modes() if not isinstance(x, DeviceContext)), None)
    if mode is not None:
        raise RuntimeError(
            f"the mode {type(mode).__name__} is open around tiles, which run in threads of their "
            "own and do not have it; open it within the step or within forward."
        )
    inference = torch.is_inference_mode_enabled()
    casts = [
        torch.autocast(kind, torch.get_autocast_dtype(kind))
        for kind in {device.type, "cpu"}
        if torch.is_autocast_enabled(kind)
    ]

    def on_rank() -> Any:
        with ExitStack() as modes:
            if not gradients:
                modes.enter_context(torch.inference_mode() if inference else torch.no_grad())
            for cast in casts:
                modes.enter_context(copy.copy(cast))
            return body()

    return on_rank


@dataclass
class _Call:
    """One call of a method, computed by ranks in turns.

    Attributes:
        module: The module of the first rank.
        results: Whole results on the host, by their number.
        modules: The modules of all ranks, which share their parameters.
        after: The random numbers of the first rank when it has ended.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[int, ...]
    shard_dims: ShardDims
    device: torch.device
    results: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    after: Any = None

    def run(self, shared: OneDevice) -> Any:
        """Return what the method gives for whole tensors."""
        self.modules = [self.module]  # all before one runs, which changes its own
        for _ in range(1, math.prod(self.sizes)):
            shared_ones = {id(p): p for p in self.module.parameters()}
            self.modules.append(_copied(self.module, shared_ones))
        body = in_modes_of_caller(self._on_rank, self.device, gradients=False)
        first, *_ = in_turns(body, math.prod(self.sizes), shared)
        set_random_state(self.after, self.device)
        leaves = [x for x in leaves_of((self.args, self.kwargs)) if isinstance(x, Tensor)]
        on_device = any(x.device.type != "cpu" for x in leaves)
        return map_leaves(partial(self._placed, on_device=on_device), first)

    def _placed(self, leaf: Any, *, on_device: bool) -> Any:
        if isinstance(leaf, _Number):
            leaf = self.results.pop(leaf.number)
        return leaf.to(self.device) if isinstance(leaf, Tensor) and on_device else leaf

    def _on_rank(self) -> Any:
        names = mesh_names(len(self.sizes))[1:]
        sizes = dict(zip(names, self.sizes, strict=True))
        mesh = init_mesh(sizes, device_type=self.device.type)
        rank = torch.distributed.get_rank()
        module = self.modules[rank]
        method = getattr(module, self.name)
        had = vars(module).get(self.name)
        setattr(module, self.name, wraps(method)(partial(self._moved, method)))
        try:
            with split_inputs(module, mesh, self.shard_dims, methods=[self.name], gather=False):
                result = getattr(module, self.name)(*self.args, **self.kwargs)
        finally:
            delattr(module, self.name)
            if had is not None:
                setattr(module, self.name, had)
        numbers = iter(range(len(leaves_of(result)) + 1))
        result = map_leaves(lambda leaf: self._to_host(leaf, next(numbers)), result)
        if rank == 0:
            self.after = random_state(self.device)
        return result

    def _moved(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method with tensors of this tile on the device."""

        def move(leaf: Any) -> Any:
            return leaf.to(self.device) if isinstance(leaf, Tensor) else leaf

        args, kwargs = map_leaves(move, (args, kwargs))
        return method(*args, **kwargs)

    def _to_host(self, leaf: Any, number: int) -> Any:
        """Write this rank's rows of a split result into the whole one on the host."""
        if isinstance(leaf, DomainTensor):
            place_rows(leaf, self.results, number)
            return _Number(number)
        return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _copied(module: nn.Module, shared: dict[int, Any]) -> nn.Module:
    """Return a copy with the same parameters, and with what a copy leaves out: the Trainer."""
    copied = copy.deepcopy(module, shared)
    for name, value in vars(module).items():
        if vars(copied).get(name) is None:
            vars(copied)[name] = value
    return copied


class _Number:
    """Stands for a whole result on the host, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


def place_rows(tensor: DomainTensor, wholes: dict[Any, Tensor], key: Any) -> None:
    """Write this rank's rows of a split tensor into the whole one of all ranks, on the host.

    All ranks of a process call it, and hold the same `wholes`.

    Args:
        tensor: The split tensor.
        wholes: The whole tensors, to which the first rank that calls adds one.
        key: The key of the whole one.
    """
    held = tensor.subdomain
    part = replace(held, local=held.local.detach().cpu())
    if any(len(dim) > 1 for dim in part.layout.dims):  # a view that joined dims
        wholes[key] = gathered(part)
        return
    if key not in wholes:
        wholes[key] = torch.empty(part.shape, dtype=part.local.dtype)
    wholes[key][_rows(part)] = part.local


def _rows(part: Subdomain) -> tuple[slice, ...]:
    grid = part.layout.grid
    bounds = [
        dim[0].bounds(grid) if dim[0].axes else (0, dim[0].extent) for dim in part.layout.dims
    ]
    return tuple(slice(low, high) for low, high in bounds)
