"""Finds in what `predict_step` returned the arrays of each sample, and the rows that are here."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_shard.data.field_sink import Field, FieldSink
from lightning_shard.data.file_field import as_array
from lightning_shard.data.tree import map_leaves
from lightning_shard.domain.align import one_factor
from lightning_shard.domain.fetch import fetch
from lightning_shard.domain.layout import Grid
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.narrow import is_dict
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.tiles import whole
from lightning_shard.tiles.tile_tensor import TileTensor

Use = Callable[[Tensor, tuple[slice, ...]], None]
_PLAIN = (str, bool, int, float, complex, type(None))


def named(prediction: Any) -> dict[str, Any]:
    """Return the values of a prediction by name: the keys of dicts, the places of tensors.

    Raises:
        ValueError: Two values have one name, or a name names nothing in a file.
    """
    found: dict[str, Any] = {}
    for name, value in _named(prediction):
        if {"", ".", ".."} & {*name.split("/")} or "\0" in name:
            raise ValueError(
                f"a prediction is named {name!r}, which names nothing in a file; give it another "
                "key, without dots alone, or nothing, between slashes."
            )
        for other in found:
            if f"{name}/".startswith(f"{other}/") or f"{other}/".startswith(f"{name}/"):
                raise ValueError(
                    f"predictions are named {other!r} and {name!r}, which one file cannot hold "
                    "both; give one of them another key."
                )
        found[name] = value
    return found


def _named(prediction: Any, name: str = "prediction") -> Iterator[tuple[str, Any]]:
    if is_dict(prediction):
        for key, value in prediction.items():
            yield from _named(value, str(key) if name == "prediction" else f"{name}/{key}")
    elif isinstance(prediction, list | tuple) and any(isinstance(x, Tensor) for x in prediction):
        for place, value in enumerate(prediction):
            yield from _named(value, str(place) if name == "prediction" else f"{name}/{place}")
    else:
        yield name, prediction


def row_of(prediction: Any, number: int, samples: int) -> Any:
    """Return what belongs to one sample of a prediction of several, in the same containers.

    Args:
        prediction: Whole tensors with the samples in dim 0. Numbers, texts and tensors without dims
            belong to each sample; of a list of them with one for each sample the sample has one.
        number: The place of the sample in its batch.
        samples: The number of samples in the batch.

    Raises:
        ValueError: A tensor has other rows.
    """

    def row(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return x[number] if len(x) == samples else x
        if not isinstance(x, Tensor | np.ndarray) or not x.ndim:
            return x
        if len(x) != samples:
            raise ValueError(
                f"predict_step returned a tensor of shape {tuple(x.shape)} for a batch of "
                f"{samples} samples; return tensors with the samples in dim 0, or without dims."
            )
        return x[number].clone() if isinstance(x, Tensor) else x[number].copy()

    return map_leaves(row, prediction, is_leaf=_is_list_of_values)


def _is_list_of_values(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(
        isinstance(each, (*_PLAIN, np.generic)) for each in x
    )


def affine_in(datasets: Sequence[Any], name: str, sample: int) -> np.ndarray | None:
    """Return the affine matrix of a sample of a prediction; None if its dataset does not know it.

    Args:
        datasets: The dataset of each dataloader: a `VolumeDataset`, a `Subset` or a `ConcatDataset`
            of some, or anything with a method `affine_of`.
        name: The name of the prediction, which begins with the number of its dataloader if there
            are several.
        sample: The number of the sample in the dataset.
    """
    dataset: Any = datasets[int(name.split("/")[0]) if len(datasets) > 1 else 0]
    while not hasattr(dataset, "affine_of"):
        if isinstance(dataset, Subset):
            dataset, sample = dataset.dataset, dataset.indices[sample]
        elif isinstance(dataset, ConcatDataset):
            number = bisect_right(dataset.cumulative_sizes, sample)
            sample -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset = dataset.datasets[number]
        else:
            return None
    return dataset.affine_of(sample)


def is_kept_as_it_is(value: Any) -> bool:
    """Return whether a value is read back from a file without running code."""
    if isinstance(value, list | tuple):
        return all(map(is_kept_as_it_is, value))
    return isinstance(value, (*_PLAIN, Tensor))


def write(sink: FieldSink, name: str, value: Tensor, count: int, indices: Sequence[int]) -> None:
    """Write the rows of a tensor (B, ...) that are here into a file that this process writes alone.

    Args:
        sink: The file.
        name: The name of the array.
        value: The tensor.
        count: The number of all samples.
        indices: The number of each of its B samples.
    """
    sink.add(name, Field(count, tuple(value.shape[1:]), dtype_of(value)), extents_of_parts(value))

    def use(rows: Tensor, where: tuple[slice, ...]) -> None:
        if rows.numel() or not value.numel():
            for sample, index in zip(as_array(rows), indices, strict=True):
                sink.write(name, index, where, sample)

    each_part(value, use)


def each_part(value: Tensor, use: Use) -> None:
    """Call a function with rows of all samples that are here, and their place in a sample.

    On ranks these are the rows of one chunk, and no two ranks have rows of the same chunk. It is a
    collective.
    """
    if isinstance(value, TileTensor):
        whole.each_part(value, lambda rows, where: use(rows, where[1:]))
    elif isinstance(value, DomainTensor):
        use(*_whole_chunks(value.subdomain))
    else:
        use(value, ())


def extents_of_parts(value: Tensor) -> list[int]:
    """Return the extents of the part of a sample that one rank or tile holds, rounded up."""
    if isinstance(value, TileTensor):
        return [max(n) for n in zip(*(p.local.shape[1:] for p in value.parts), strict=True)]
    if not isinstance(value, DomainTensor):
        return list(value.shape[1:])
    layout = value.subdomain.layout
    extents = enumerate(value.shape)
    return [-(-n // layout.grid.parts(layout.axes(d))) for d, n in extents][1:]


def dtype_of(x: Tensor) -> np.dtype:
    """Return the dtype of the array that a tensor becomes."""
    return as_array(torch.empty(0, dtype=x.dtype, device="cpu")).dtype


def _whole_chunks(x: Subdomain) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's chunk of all samples and its place: no two ranks write into one chunk."""
    where = [slice(None)] * x.ndim
    for dim, extent in enumerate(x.shape):
        axes = x.layout.axes(dim)
        if axes:
            x = one_factor(x, dim)
            bounds = list(_bounds(extent, x.layout.grid, axes))
            local = fetch(x, dim, tuple((b,) if b[0] < b[1] else () for b in bounds))
            where[dim] = slice(*bounds[x.layout.grid.index(axes)])
            x = Subdomain(local, x.layout, x.domain)
    return x.local, tuple(where[1:])


def _bounds(extent: int, grid: Grid, axes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    size = -(-extent // grid.parts(axes))
    for part in range(grid.parts(axes)):
        yield min(part * size, extent), min((part + 1) * size, extent)
