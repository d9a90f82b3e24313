"""Runs a module on one device in tiles, one after the other: exact, for fields of any size."""

import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.data.field_sink import FieldSink
from lightning_shard.data.file_field import FileField, fields_of
from lightning_shard.data.sink_parts import named, write
from lightning_shard.data.split import ShardDims
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.memory.paging.device_pager import pager_of
from lightning_shard.memory.recompute import is_compiled
from lightning_shard.memory.sizes import bytes_of
from lightning_shard.memory.split_inputs import replacing, splitting, wraps
from lightning_shard.ops.elementwise.random import use_exact_random
from lightning_shard.processes.arguments import check_module, names_of
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor
from lightning_shard.tiles.whole import gathered_tiles


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
    source: Any = None,
    sink: FieldSink | str | Path | None = None,
    gather: bool = True,
) -> Generator[list[FileField]]:
    """Compute the calls of a module in tiles on one device, one after the other, exactly.

    The module's Python runs once, and each operation runs for all tiles, one after the other. While
    one tile computes, what the others hold lies in the host's memory. So the device holds the
    tensors of one operation of one tile, and the host about what the device would have held.
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
            travels. By default half of what is free there; on a CPU, and for "0", as many as the
            largest operation of a tile needs.
        exact_random: False lets each tile draw random numbers of its own, reproducibly, for tensors
            that are split. By default it draws those of the whole tensor, which are then on the
            device at once, and keeps its part; see `use_exact_random`.
        source: A file, or a list of files: `FieldFile`, `VolumeFile` or `ImageFile`. Its samples
            are yielded one by one, to be given to the module as they are: each tile reads its rows.
        sink: A file, such as "out.zarr", or a `FieldSink`: each tile writes its rows of the results
            there, as the sample that the call was given. A call returns the path of the file.
        gather: False leaves results in tiles, for what takes fields in tiles.

    Yields:
        The samples of `source`, fields `(1, C, *spatial)` that are not in memory.

    Raises:
        ValueError: `tiles` is no number from 1 on, or the module lacks a method, is compiled, has
            sharded parameters, or is in tiles already. A call in which no tensor is split raises
            it, too. So does a sink without a source.
        TypeError: The module or a method's name is none.
        RuntimeError: A call wants gradients.

    Example:
        >>> with torch.inference_mode(), in_tiles(network, 8):
        ...     volume = network(volume)  # on the host, as large as it is

        >>> files = {"source": FieldFile("in.zarr"), "sink": "out.zarr", "tile_memory": "/scratch"}
        >>> with torch.inference_mode(), in_tiles(network, 64, **files) as fields:
        ...     for field in fields:
        ...         network(field)  # from file to file
    """
    sizes, methods = sizes_of_tiles(tiles), names_of(methods, "methods")
    check_module(module, "in_tiles")
    _refuse(module)
    with replacing(module, methods):
        where = _device_of(module) if device is None else torch.device(device)
        budget = None if tile_budget is None else bytes_of(tile_budget, "tile_budget")
        pager = pager_of(where, budget, tile_memory)
        grid = Tiles(sizes, pager)
        dtypes = (x.dtype for x in module.parameters() if x.is_floating_point())
        fields = (
            [] if source is None else fields_of(source, next(dtypes, torch.get_default_dtype()))
        )
        output = None if sink is None else _Output(sink, fields)
        before = {name: vars(module)[name] for name in methods if name in vars(module)}
        try:
            for name in methods:
                method = getattr(module, name, None)
                if callable(method):  # else `splitting` says what is missing
                    setattr(module, name, _on_device(method, where))
            with splitting(module, grid, shard_dims, methods, gather=False):
                for name in methods:
                    call = _calling(name, getattr(module, name), where, exact_random)
                    if output is not None:
                        call = output.writing(call)
                    elif gather:
                        call = _whole(call, where)
                    setattr(module, name, call)
                yield fields
            if output is not None:
                output.sink.close()
        except BaseException:
            if output is not None:
                output.sink.abandon()
            raise
        finally:
            for name in methods:
                vars(module).pop(name, None)
            vars(module).update(before)
            grid.close()
            if pager is not None:
                pager.close()


def _on_device(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a method that is given tensors on the device."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(lambda leaf: to_device(leaf, device), (args, kwargs))
        return method(*args, **kwargs)

    return call


def _calling(
    name: str, method: Callable[..., Any], device: torch.device, exact_random: bool
) -> Callable[..., Any]:
    """Return a method that refuses gradients, and reads fields of files on the device."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} was called in tiles, which keep no gradients; call it within "
                "torch.inference_mode() or torch.no_grad()."
            )
        args, kwargs = map_leaves(lambda leaf: _read_on(leaf, device), (args, kwargs))
        with use_exact_random(exact_random):
            return method(*args, **kwargs)

    return call


def _read_on(leaf: Any, device: torch.device) -> Any:
    """Return a field of a file whose rows are moved to the device; other leaves as they are."""
    if not isinstance(leaf, FileField):
        return leaf
    # a Trainer of another precision sets the default for the step
    default = torch.get_default_dtype()
    converts = leaf.dtype == torch.float32 and default != leaf.dtype
    return leaf.to(device, default if converts else leaf.dtype)


def _whole(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a method whose results are whole, where the tensors of the call lay."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        place = device if any(x.device.type != "cpu" for x in given) else torch.device("cpu")
        result = method(*args, **kwargs)
        return map_leaves(lambda leaf: whole_at(leaf, place), result)

    return call


class _Output:
    """Writes what calls return into a file, each as the sample of a source that it was given.

    Args:
        sink: The file, or its name.
        fields: The samples.
    """

    def __init__(self, sink: FieldSink | str | Path, fields: Sequence[FileField]) -> None:
        if not fields:
            raise ValueError(
                "sink takes the results of a source's samples; give source, such as "
                'FieldFile("in.zarr"), or take the results as they are returned.'
            )
        if not isinstance(sink, FieldSink):
            sink = FieldSink(sink, affine=lambda name, sample: fields[sample].affine)
        self.sink = sink
        self._fields, self._done = fields, set[int]()
        self._writes = threading.Lock()  # several threads may call the network

    def writing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose results go into the file."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            results = named(method(*args, **kwargs))
            with self._writes:
                self._write(results, self._number(args, kwargs))
            return self.sink.path

        return call

    def _write(self, results: Mapping[str, Any], number: int) -> None:
        """Write what a call has returned, as a sample of this number."""
        if number in self._done or number >= len(self._fields):
            raise RuntimeError(
                f"{self.sink.path} holds one result of each of {len(self._fields)} samples of "
                f"the source, and there is one of sample {min(number, len(self._done) - 1)} "
                "already; call the module once for each."
            )
        for name, value in results.items():
            if not isinstance(value, Tensor) or not value.ndim or len(value) != 1:
                raise ValueError(
                    f"the call returned {name!r} of type {type(value).__name__}, which is not "
                    "a tensor with one sample in dim 0; a sink takes these alone."
                )
            write(self.sink, name, value, len(self._fields), [number])
        self._done.add(number)

    def _number(self, *given: Any) -> int:
        """Return the number of the sample that a call is given; of no sample that of the call."""
        places = [n for x in leaves_of(given) for n, f in enumerate(self._fields) if f is x]
        return places[0] if places else len(self._done)


def to_device(leaf: Any, device: torch.device) -> Any:
    """Return a tensor on the device; of a field each tile moves its own part."""
    return leaf.to(device) if isinstance(leaf, Tensor) and leaf.device != device else leaf


def whole_at(leaf: Any, device: torch.device) -> Any:
    """Return the whole of a field, or a plain tensor, on a device; other leaves as they are."""
    if isinstance(leaf, TileTensor):
        return gathered_tiles(leaf, device)
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


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
