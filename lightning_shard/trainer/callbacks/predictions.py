"""Writes predictions in the order of the dataset, each rank its own part; or puts them in memory.

Zarr takes the parts of all ranks. Every other format is written by one process: several ranks leave
their parts in files, which the first rank puts together at the end, one after the other.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.data.atomic import disk_errors, partial_of, remove
from lightning_shard.data.field_sink import ARRAYS, Field, FieldSink, refuse_another
from lightning_shard.data.file_field import as_array
from lightning_shard.data.sink_parts import (
    affine_in,
    dtype_of,
    each_part,
    extents_of_parts,
    is_kept_as_it_is,
    named,
    row_of,
    write,
)
from lightning_shard.data.tree import map_leaves
from lightning_shard.lightning import (
    BasePredictionWriter,
    LightningModule,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_shard.processes.errors_together import gather_to_first
from lightning_shard.processes.torch_private.internals import tree_leaves, tree_map_only
from lightning_shard.tensor.placement import gather
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.trainer.callbacks.shared_arrays import SharedArrays

_STREAM = (
    "predictions can be ordered only if the dataloader knows the indices of their samples; this "
    "one reads a stream, or whole batches of a dataset (batch_size=None)"
)
_WITH_INDICES = "give it a batch size and a dataset with indices"
_WAYS = "leave it out, make it one, or write into a folder"


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict_step` returns, each sample once, in the order of the dataset.

    The end of the path chooses the format: see `FieldSink`. Sample i of the dataset is row i of
    each array, or file i of a folder, whatever mesh predicted it. Nothing is gathered: each rank
    writes its own part of a field. The file has its name when it is whole; until then the name ends
    in `.partial`.

    Use it with `trainer.predict(..., return_predictions=False)`, so that nothing piles up in
    memory. A tensor that `predict_step` returns by itself is named `prediction`, entries of a dict
    have their keys, those of a tuple their places; with several dataloaders the arrays of each lie
    in a group of its number. Texts and numbers are kept in a folder only.
    """

    def __init__(self, path: str | Path | None = None, overwrite: bool = False) -> None:
        """Choose the file.

        Args:
            path: A name on a file system that all ranks see: `predictions.zarr`, `.h5`, `.nii.gz`,
                `.tif`, or a folder. None: the folder `predictions` beside the logs of the run, from
                which is left out what no file holds.
            overwrite: True to replace what is there; otherwise an existing file is an error.

        Raises:
            ModuleNotFoundError: The package of the format is not installed.
            ValueError: The end of the path is not known.
        """
        super().__init__("batch")
        if path is not None:
            FieldSink(path, overwrite=True)  # says what is missing, before the run
        self.path = None if path is None else Path(path)
        self.overwrite = overwrite
        self._sink: Any = None
        self._left_out: set[str] = set()
        self._written = defaultdict[str, set[int]](set)  # samples of each array, on this rank
        self._fields: dict[str, Field] = {}  # those of this rank, of several

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the file beside the path, to be renamed at the end.

        Raises:
            FileExistsError: There are predictions, and `overwrite` is false.
            NotADirectoryError: A folder of the path is a file.
        """
        path = self.path or trainer.strategy.broadcast(_beside_logs(trainer))
        loaders = tree_leaves(trainer.predict_dataloaders)
        datasets = [getattr(loader, "dataset", None) for loader in loaders]
        self._sink = FieldSink(path, self.overwrite, partial(affine_in, datasets))
        staged = partial_of(self._sink.path)
        self._sink.partial, self._staged = trainer.strategy.broadcast((self._sink.partial, staged))
        self._arrays = SharedArrays(self._sink.partial, self._staged)
        self._left_out.clear()
        self._written.clear()
        self._fields.clear()
        trainer.strategy.barrier("PredictionWriter.on_predict_start")
        if trainer.is_global_zero:
            self._sink.begin()
        trainer.strategy.barrier("PredictionWriter.begun")

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write this rank's rows of the samples of one batch at their places in the data set.

        Raises:
            ValueError: The data set has no indices, or something has no place in the file.
        """
        self._place = dataloader_idx, batch_idx
        if prediction is not None:
            self._write_batch(trainer, prediction, batch_indices)
        if trainer.is_global_zero and _ranks() > 1 and self._sink.end == ".zarr":
            with disk_errors(self._sink.path):
                self._arrays.pass_batch(self._place)

    def _write_batch(
        self, trainer: Trainer, prediction: Any, batch_indices: Sequence[int] | None
    ) -> None:
        dataloader_idx, _ = self._place
        if not batch_indices:
            self._leave_out("a stream", _STREAM, _WITH_INDICES)
            return
        loaders = tree_leaves(trainer.predict_dataloaders)
        several = len(loaders) > 1
        # the first rank of a domain writes what is equal on all of them
        self._is_first_of_domain = getattr(trainer.strategy, "domain_rank", 0) == 0
        for name, value in named(prediction).items():
            full = f"{dataloader_idx}/{name}" if several else name
            if isinstance(value, Tensor) and value.ndim and len(value) == len(batch_indices):
                self._write(full, value, len(loaders[dataloader_idx].dataset), batch_indices)
                self._written[full].update(batch_indices)
            elif self._sink.end or not is_kept_as_it_is(value):
                kind = f"type {type(value).__name__}"
                kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind
                self._leave_out(
                    name,
                    f"predict_step returned {name!r} of {kind}, which is not a tensor with the "
                    f"{len(batch_indices)} samples of its batch in dim 0",
                )
            else:
                whole = tree_map_only(DomainTensor, gather, value)
                if self._is_first_of_domain:
                    self._keep(full, whole, batch_indices)

    def _leave_out(self, what: str, why: str, ways: str = _WAYS) -> None:
        """Refuse it, or say once that it is left out, where nobody has asked for a file.

        Raises:
            ValueError: Somebody has.
        """
        if self.path is not None:
            raise ValueError(f"{why}; {ways}.")
        if what not in self._left_out:
            self._left_out.add(what)
            rank_zero_warn(f"{why}. It is not kept.")

    def _write(self, name: str, value: Tensor, samples: int, indices: Sequence[int]) -> None:
        sink: FieldSink = self._sink
        if _ranks() == 1:
            write(sink, name, value, samples, indices)
            return
        field = Field(samples, tuple(value.shape[1:]), dtype_of(value))
        extents = extents_of_parts(value)
        if sink.end in ARRAYS:
            refuse_another(sink.path, name, self._fields.setdefault(name, field), field)
        if dist.get_rank() == 0:  # it has a batch whenever another rank has one
            sink.add(name, field, extents)
        array = self._arrays.array(name, self._place) if sink.end == ".zarr" else None
        if array is not None:
            made = Field(array.shape[0], tuple(array.shape[1:]), array.dtype)
            refuse_another(sink.path, name, made, field)

        def use(rows: Tensor, where: tuple[slice, ...]) -> None:
            for sample, index in zip(as_array(rows), indices, strict=True):
                if array is not None and sample.size:
                    with disk_errors(sink.path):
                        array[(index, *where)] = sample
                elif sample.size or (self._is_first_of_domain and not value.numel()):
                    self._stage(name, index, where, sample, field.shape)

        if isinstance(value, DomainTensor) or self._is_first_of_domain:
            each_part(value, use)

    def _stage(
        self,
        name: str,
        index: int,
        where: Sequence[slice],
        values: np.ndarray,
        shape: Sequence[int],
    ) -> None:
        """Leave a part of a sample, and the shape of the whole, to the first rank."""
        place = self._staged / quote(name, safe="") / str(index)
        starts = [part.start or 0 for part in where] or [0] * values.ndim
        bounds = zip(starts, values.shape, strict=True)
        words = "_".join(f"{start}-{start + count}" for start, count in bounds)
        whole = "x".join(map(str, shape))
        values = np.ascontiguousarray(values)
        header = np.lib.format.header_data_from_array_1_0(values)
        with disk_errors(self._sink.path):
            place.mkdir(parents=True, exist_ok=True)
            with (place / f"{words or 'number'}.{whole}.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                file.write(memoryview(values))  # pyright: ignore[reportArgumentType] - np.save does not say what failed

    def _keep(self, name: str, value: Any, indices: Sequence[int]) -> None:
        """Keep a list of values of samples, or one value of all of them."""
        is_each = isinstance(value, list | tuple) and len(value) == len(indices)
        for number, index in enumerate(indices):
            one = value[number] if is_each else value
            if _ranks() == 1:
                self._sink.keep(name, index, one)
                continue
            place = self._staged / quote(name, safe="") / str(index)
            with disk_errors(self._sink.path):
                place.mkdir(parents=True, exist_ok=True)
                with (place / "value.pt").open("wb") as file:
                    torch.save(one, file)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the finished file its name, once all ranks have written, and say where it is."""
        trainer.strategy.barrier("PredictionWriter.on_predict_end")
        written = gather_to_first(dict(self._written)) if _ranks() > 1 else [self._written]
        if trainer.is_global_zero:
            self._put_together(trainer)
            made = self._sink.close()
            rank_zero_info(_words(self._sink, made))
            self._say_what_lacks(written)
        trainer.strategy.barrier("PredictionWriter.renamed")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say that nothing was written, if there was no batch."""
        if stage == "predict" and self._sink is None:
            rank_zero_warn("There was no batch to predict, so no predictions are written.")
        self._sink = None

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove what was written of predictions that are not whole, and say so."""
        if trainer.predicting and self._sink is not None:
            path = self._sink.path
            rank_zero_info(
                f"No predictions are kept in {path}, since not all were made: run again."
            )
            with suppress(OSError):  # another rank may be writing, or removing
                if trainer.is_global_zero:
                    self._sink.abandon()
                remove(self._staged)

    def _say_what_lacks(self, written: Sequence[Mapping[str, set[int]]]) -> None:
        """Warn of rows of arrays that hold no prediction."""
        for name, field in self._sink.fields.items() if self._sink.end in ARRAYS else ():
            predicted = len(set[int]().union(*(each.get(name, ()) for each in written)))
            if predicted < field.count:
                rank_zero_warn(
                    f"{predicted} of the {field.count} samples have a {name!r}; the rows of the "
                    f"others in {self._sink.path} are "
                    f"{'NaN' if field.dtype.kind in 'fc' else 'zero'}."
                )

    def _put_together(self, trainer: Trainer) -> None:
        """Write the parts that ranks have left."""
        loaders = tree_leaves(trainer.predict_dataloaders)
        for place in sorted(self._staged.glob("*/*")) if self._staged.is_dir() else ():
            name, index = unquote(place.parent.name), int(place.name)
            parts: list[tuple[tuple[slice, ...], np.ndarray]] = []
            shape: tuple[int, ...] = ()
            for file in sorted(place.iterdir()):
                if file.suffix == ".pt":
                    self._sink.keep(name, index, torch.load(file, weights_only=True))
                    continue
                rows, extents = file.stem.split(".")
                shape = tuple(int(extent) for extent in extents.split("x") if extent)
                words = [word.split("-") for word in rows.split("_") if "-" in word]
                where = tuple(slice(int(start), int(end)) for start, end in words)
                is_empty = any(part.stop == 0 for part in where)
                parts.append((where, np.load(file, mmap_mode=None if is_empty else "r")))
            if parts:
                number = int(name.split("/")[0]) if len(loaders) > 1 else 0
                field = Field(len(loaders[number].dataset), shape, parts[0][1].dtype)
                self._sink.add(name, field)
            for where, values in parts:
                self._sink.write(name, index, where, values)
            shutil.rmtree(place)
        remove(self._staged)


def predictions_in_order(trainer: Trainer, batches: Sequence[Any]) -> list[Any]:
    """Put what `trainer.predict` returned in the order of the dataset, one entry for each sample.

    All ranks must call it, and each gets all of it whole on the CPU: for fields that do not fit,
    use `PredictionWriter`.

    Args:
        trainer: After `trainer.predict`, and before it runs anything else.
        batches: The list that it returned on this rank for one dataloader, with samples in dim 0.

    Raises:
        ValueError: The dataloader does not say which samples are in a batch, or the list has not as
            many batches as the last `trainer.predict` has read.
    """
    loader = _loader_of(trainer, batches)
    mine: dict[int, Any] = {}
    seen = getattr(loader.batch_sampler, "seen_batch_indices", None)
    if seen is None:
        raise ValueError(
            f"{_STREAM}; {_WITH_INDICES}, or return the number of each sample from predict_step."
        )
    for indices, batch in zip(seen, batches, strict=False):
        whole = map_leaves(lambda x: gather(x).cpu() if isinstance(x, Tensor) else x, batch)
        mine |= {index: row_of(whole, n, len(indices)) for n, index in enumerate(indices)}
    group = getattr(trainer.strategy, "data_group", None)
    everywhere: list[dict[int, Any]] = [mine]
    if group is not None:
        everywhere = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everywhere, mine, group)
    found = {index: value for each in everywhere for index, value in each.items()}
    return [found[index] for index in sorted(found)]


def _loader_of(trainer: Trainer, batches: Sequence[Any]) -> Any:
    """Return the dataloader whose predictions these are.

    Raises:
        ValueError: There are several, and it is the list of none; or there is none any more.
    """
    loaders = tree_leaves(trainer.predict_dataloaders)
    returned = [] if loaders == [None] else trainer.predict_loop.predictions
    if len(loaders) == 1:
        if loaders[0] is not None and len(returned) in (0, len(batches)):
            return loaders[0]
        last = f"{len(returned)} batches" if returned else "none"
        raise ValueError(
            f"these are predictions of {len(batches)} batches, and the last run of the trainer "
            f"predicted {last}: the order is that of the last run, so call predictions_in_order "
            "after trainer.predict, before the trainer runs anything else."
        )
    places = [place for place, each in enumerate(returned) if each is batches]
    if not places:
        raise ValueError(
            f"trainer.predict read {len(loaders)} dataloaders and returned a list for each; give "
            "one of these lists, as predictions_in_order(trainer, returned[0]), without changes."
        )
    return loaders[places[0]]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _beside_logs(trainer: Trainer) -> Path:
    """Return the name of a new folder beside the logs; a collective."""
    folder = Path(str(trainer.log_dir or trainer.default_root_dir))
    names = ("predictions", *(f"predictions_{number}" for number in range(1, 10**6)))
    return next(folder / name for name in names if not (folder / name).exists())


def _words(sink: FieldSink, made: Sequence[Path]) -> str:
    """Say what was written, and where."""
    if not made:
        return "predict_step returned nothing that is kept, so no predictions are written."
    fields = [
        f"{name} of several shapes" if name in sink.several
        else f"{name} {(f.count, *f.shape)} {f.dtype}"
        for name, f in sink.fields.items()
    ]  # fmt: skip
    where = made[0] if len(made) == 1 else f"{made[0]} to {made[-1].name}"
    return f"Predictions: {where}" + (f" ({', '.join(fields)})" if fields else "")
