"""Puts predictions in the order of the dataset: slab by slab in a Zarr file, or in memory."""

import importlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from typing_extensions import override

from lightning_shard.domain.align import one_factor
from lightning_shard.domain.fetch import fetch
from lightning_shard.domain.layout import Grid
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.processes.narrow import is_dict, is_list
from lightning_shard.processes.store import store_of_attempt
from lightning_shard.processes.torch_private.internals import tree_map_only
from lightning_shard.tensor.placement import gather
from lightning_shard.tensor.tensor import DomainTensor

if TYPE_CHECKING:
    import zarr

PATIENCE_S = 600.0  # for rank 0 to predict its first batch


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict_step` returns into one Zarr group, each rank its own part of the fields.

    Nothing is gathered: a chunk of the file is the part of one sample that one rank holds (a few
    rows move to a neighbour where the extent is not divisible by the ranks). Row i of each array is
    sample i of the dataset, whatever mesh predicted it. The group appears under its name when it is
    whole; until then its name ends in `.part`.

    Use it with `trainer.predict(..., return_predictions=False)`, so that nothing piles up in
    memory, and read with `zarr.open(path)["prediction"][i]`. A tensor that `predict_step` returns
    by itself is named `prediction`, entries of a dict have their keys; with several dataloaders the
    arrays of each lie in a group of its number.
    """

    def __init__(self, path: str | Path, overwrite: bool = False) -> None:
        """Choose the file.

        Args:
            path: A directory name on a file system that all ranks see, such as `predictions.zarr`.
            overwrite: True to replace what is there; otherwise an existing file is an error.

        Raises:
            ModuleNotFoundError: The package zarr is not installed.
        """
        super().__init__("batch")
        _import_zarr()  # before anything is computed
        self.path = Path(path)
        self.overwrite = overwrite
        self._partial = self.path.with_name(self.path.name + ".part")

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make an empty array file beside the path, to be renamed at the end.

        Raises:
            FileExistsError: There are predictions, and `overwrite` is false.
        """
        if self.path.exists() and not self.overwrite:
            raise FileExistsError(
                f"the predictions {self.path} are there already; choose another path, or "
                "overwrite=True to replace them."
            )
        if trainer.is_global_zero:
            shutil.rmtree(self._partial, ignore_errors=True)  # an earlier run did not end
            _import_zarr().open_group(self._partial, mode="w")
        trainer.strategy.barrier("PredictionWriter.on_predict_start")

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
            ValueError: The data set has no indices, or a prediction has no dim of samples.
        """
        if not batch_indices:
            raise ValueError(
                "predictions can be ordered only if the dataset has indices; this dataloader reads "
                "a stream. Write from predict_step, or use a dataset with __getitem__."
            )
        loaders: Any = trainer.predict_dataloaders
        several = is_list(loaders) and len(loaders) > 1
        loader = loaders[dataloader_idx] if is_list(loaders) else loaders
        prefix = f"{dataloader_idx}/" if several else ""
        entries = prediction if is_dict(prediction) else {"prediction": prediction}
        for name, value in entries.items():
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(batch_indices):
                raise ValueError(
                    f"predict_step returned {name!r} of type {type(value).__name__}, which is not "
                    f"a tensor with the {len(batch_indices)} samples of its batch in dim 0; leave "
                    "it out, or make it one."
                )
            array = self._array(f"{prefix}{name}", value, len(loader.dataset), trainer)
            self._write(array, value, batch_indices, trainer)

    def _array(self, name: str, value: Tensor, samples: int, trainer: Trainer) -> "zarr.Array[Any]":
        """Return the array, which rank 0 makes: it has a batch whenever another rank has one."""
        if trainer.is_global_zero and not (self._partial / name).exists():
            x = _on_cpu(value.subdomain.local if isinstance(value, DomainTensor) else value)
            _import_zarr().create_array(
                self._partial,
                name=name,
                shape=(samples, *value.shape[1:]),
                chunks=(1, *(max(n, 1) for n in _chunks(value)[1:])),
                dtype=x.numpy().dtype,
            )
        deadline = time.monotonic() + PATIENCE_S
        while not (self._partial / name / "zarr.json").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank 0 has not made {self._partial / name} in {PATIENCE_S:.0f} s; the path "
                    "must lie on a file system that all ranks see."
                )
            time.sleep(0.02)
            # ranks that share a process take turns where they look into the store
            if dist.is_initialized():
                store_of_attempt().check(["the array of rank 0"])
        return _import_zarr().open_array(self._partial, path=name, mode="r+")

    def _write(
        self, array: "zarr.Array[Any]", value: Tensor, indices: Sequence[int], trainer: Trainer
    ) -> None:
        if isinstance(value, DomainTensor):
            rows, where = _whole_chunks(value.subdomain)
        elif getattr(trainer.strategy, "domain_rank", 0) == 0:
            rows, where = value, []
        else:  # equal on all ranks of a domain: its first writes it
            return
        if rows.numel():
            for sample, index in zip(_on_cpu(rows).numpy(), indices, strict=True):
                array[(index, *where)] = sample

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rename the finished file to the path, once all ranks have written."""
        trainer.strategy.barrier("PredictionWriter.on_predict_end")
        if trainer.is_global_zero:
            if self.path.exists():
                shutil.rmtree(self.path)
            self._partial.rename(self.path)
        trainer.strategy.barrier("PredictionWriter.renamed")


def predictions_in_order(trainer: Trainer, batches: Sequence[Any]) -> list[Any]:
    """Put what `trainer.predict` returned in the order of the dataset, one entry for each sample.

    All ranks must call it, and each gets all of it whole on the CPU: for fields that do not fit,
    use `PredictionWriter`.

    Args:
        trainer: After `trainer.predict`.
        batches: The list that it returned on this rank for one dataloader, with samples in dim 0.
    """
    loader: Any = trainer.predict_dataloaders
    loader = loader[0] if is_list(loader) else loader
    mine: dict[int, Any] = {}
    for indices, batch in zip(loader.batch_sampler.seen_batch_indices, batches, strict=False):
        whole = tree_map_only(Tensor, lambda x: gather(x).cpu(), batch)
        for i, index in enumerate(indices):
            mine[index] = tree_map_only(Tensor, lambda x, i=i: x[i].clone(), whole)
    group = getattr(trainer.strategy, "data_group", None)
    everywhere: list[dict[int, Any]] = [mine]
    if group is not None:
        everywhere = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everywhere, mine, group)
    found = {index: value for each in everywhere for index, value in each.items()}
    return [found[index] for index in sorted(found)]


def _import_zarr() -> Any:
    """Import the package zarr, which the plain install lacks."""
    try:
        return importlib.import_module("zarr")
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError(
            "PredictionWriter needs the package 'zarr', which is not installed; "
            "pip install 'lightning-shard[zarr]' installs it.",
            name=err.name,
        ) from err


def _chunks(value: Tensor) -> list[int]:
    """Return the extents of the part that one rank holds, rounded up."""
    if not isinstance(value, DomainTensor):
        return list(value.shape)
    layout = value.subdomain.layout
    return [-(-n // layout.grid.parts(layout.axes(d))) for d, n in enumerate(value.shape)]


def _whole_chunks(x: Subdomain) -> tuple[Tensor, list[slice]]:
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
    return x.local, where[1:]


def _bounds(extent: int, grid: Grid, axes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    size = -(-extent // grid.parts(axes))
    for part in range(grid.parts(axes)):
        yield min(part * size, extent), min((part + 1) * size, extent)


def _on_cpu(x: Tensor) -> Tensor:
    """Copy a tensor to the CPU, bfloat16 as float32, since numpy has no bfloat16."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    return x.float() if x.dtype == torch.bfloat16 else x
