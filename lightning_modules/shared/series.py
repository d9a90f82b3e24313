"""Loads pairs of states from files of simulations and of weather."""

from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_shard import SeriesDataset


class SeriesDataModule(LightningDataModule):
    """Serves loaders of `SeriesDataset`, one for each stage; without normalization.

    Args:
        train: Files or folders of the training samples.
        val: Files or folders of the validation samples, if there are any.
        test: Files or folders of the test samples, if there are any; `predict` reads them, too.
        variables: See `SeriesDataset`, like the arguments up to `spatial_dims`.
        inputs: Steps in `x`.
        outputs: Steps in `y`.
        every: Steps of the file from one step of a sample to the next.
        select: Coordinates to keep, for NetCDF and Zarr.
        time: The dim of steps, for NetCDF and Zarr.
        spatial_dims: Number of spatial dims, where the file does not say it.
        batch_size: Samples per data-parallel rank and step.
        num_workers: Worker processes per loader.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.

    Raises:
        ValueError: A number is too small, or files of one stage have other channels than those of
            training.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        variables: list[str] | None = None,
        inputs: int = 1,
        outputs: int = 1,
        every: int = 1,
        select: dict[str, list[float]] | None = None,
        time: str = "time",
        spatial_dims: int = 2,
        batch_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, batch_size=batch_size)
        at_least(0, num_workers=num_workers)
        self.save_hyperparameters()
        self.paths = {"train": train, "val": val, "test": test}
        self.batch_size = batch_size
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        self.options: dict[str, Any] = {
            "variables": variables, "inputs": inputs, "outputs": outputs, "every": every,
            "select": select, "time": time, "spatial_dims": spatial_dims,
        }  # fmt: skip

    @override
    def setup(self, stage: str) -> None:
        self.datasets = {
            name: SeriesDataset(path, trainer=self.trainer, **self.options)
            for name, path in self.paths.items()
            if path is not None
        }
        for name, dataset in self.datasets.items():
            _same_channels(f"{self.paths[name]}", dataset, self.datasets["train"])

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> Any:
        return self._loader("val") if "val" in self.datasets else []

    @override
    def test_dataloader(self) -> Any:
        return self._loader("test") if "test" in self.datasets else []

    @override
    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def _loader(self, name: str, *, shuffle: bool = False) -> DataLoader[dict[str, Any]]:
        return make_loader(self.datasets[name], self.batch_size, shuffle=shuffle, **self.loading)


def _same_channels(path: str, dataset: SeriesDataset, train: SeriesDataset) -> None:
    """Compare the variables of files with those of training, and their levels; grids may differ.

    Raises:
        ValueError: The network would be given other channels than it was trained with.
    """
    file, first = dataset.files[0], train.files[0]
    channels, wanted = ([(v.name, v.components) for v in f.variables] for f in (file, first))
    if channels != wanted:
        raise ValueError(
            f"{path} has the channels {channels}, but training has {wanted}; name `variables`."
        )
    for dim, values in file.grid.items():
        others = first.grid.get(dim)
        if values is None or others is None or np.array_equal(values, others):
            continue
        # a grid of another resolution is right, and one that is turned is not
        if np.array_equal(np.sort(values), np.sort(others)) or "lev" in str(dim).lower():
            raise ValueError(
                f"{path} has other coordinates along {dim!r} than training ({values[0]} to "
                f"{values[-1]}, not {others[0]} to {others[-1]}); write the files alike, or name "
                "them in `select`."
            )
