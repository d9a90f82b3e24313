"""Windows of consecutive states as Aurora's batches, of which each rank reads its part.

A batch is `aurora.Batch` with a longer history than Aurora reads: the two states that it reads, and
after them the states that it is to forecast. `metadata.time` is that of the last state that it
reads.

Shapes: B samples, T states, C levels, H latitudes, W longitudes.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, stack
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lightning_modules.aurora.era5 import Era5
from lightning_modules.aurora.waves import Waves
from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.optional import optional
from lightning_shard import slab_of

HISTORY = 2  # states that Aurora reads
SURFACE, UPPER, STATIC = ("2t", "10u", "10v", "msl"), ("z", "u", "v", "t", "q"), ("lsm", "z", "slt")


class Source(Protocol):
    """Gives states, six hours apart; `steps` is their number, if there is a last one."""

    latitudes: Tensor
    longitudes: Tensor
    levels: tuple[int, ...]
    steps: int | None

    def time(self, step: int) -> datetime: ...
    def surface(self, name: str, step: int, rows: slice, columns: slice) -> Tensor: ...
    def upper(self, name: str, step: int, rows: slice, columns: slice) -> Tensor: ...
    def static(self, name: str) -> Tensor: ...


class WeatherDataset(Dataset[dict[str, Any]]):
    """Windows of states; of the variables that change this rank's part alone.

    Args:
        source: The source of the states.
        starts: The first state of each window.
        length: Number of states T of a window.
        trainer: The trainer that will use the samples; None for whole fields.
    """

    def __init__(
        self, source: Source, starts: range, length: int, trainer: Trainer | None = None
    ) -> None:
        self.source, self.starts, self.length = source, starts, length
        self.static = {name: source.static(name) for name in STATIC}
        grid = (len(source.latitudes), len(source.longitudes))
        self.surface = slab_of(trainer, "surf_vars", (length, *grid))
        self.upper = slab_of(trainer, "atmos_vars", (length, len(source.levels), *grid))

    def __len__(self) -> int:
        return len(self.starts)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        start = self.starts[index]
        return {
            "surf_vars": {name: self._surface(name, start) for name in SURFACE},
            "atmos_vars": {name: self._upper(name, start) for name in UPPER},
            "time": self.source.time(start + HISTORY - 1),
        }

    def _surface(self, name: str, start: int) -> Any:
        times, rows, columns = self.surface.index
        steps = range(start, start + self.length)[times]
        states = [self.source.surface(name, step, rows, columns) for step in steps]
        return self.surface.part(stack(states), start)

    def _upper(self, name: str, start: int) -> Any:
        times, levels, rows, columns = self.upper.index
        steps = range(start, start + self.length)[times]
        states = [self.source.upper(name, step, rows, columns)[levels] for step in steps]
        return self.upper.part(stack(states), start)

    def collate(self, samples: Sequence[dict[str, Any]]) -> Any:
        """Make Aurora's batch of some samples."""
        aurora = optional("aurora", "AuroraDataModule", "aurora")
        fields = default_collate([{k: s[k] for k in ("surf_vars", "atmos_vars")} for s in samples])
        return aurora.Batch(
            static_vars=self.static,
            metadata=aurora.Metadata(
                lat=self.source.latitudes,
                lon=self.source.longitudes,
                time=tuple(sample["time"] for sample in samples),
                atmos_levels=self.source.levels,
            ),
            **fields,
        )


class AuroraDataModule(LightningDataModule):
    """Serves windows of ERA5, or of made-up weather where no files are named.

    Samples for training are the first windows, those for validation and test follow in time,
    without a state in common. Latitudes are split with `shard_dims: -2`.

    Args:
        surface: A NetCDF file or Zarr group of ERA5's surface variables; None makes weather up.
        atmospheric: A file or group of the variables at pressure levels.
        static: A file or group of land-sea mask, orography and soil type.
        names: The name of a variable in the files, by Aurora's name, such as `{"2t": "t2m"}`.
        levels: Pressure levels in hPa; Aurora knows 50, 100, 150, 200, 250, 300, 400, 500, 600,
            700, 850, 925 and 1000.
        resolution: Latitudes and longitudes of made-up weather. Aurora wants a multiple of 4
            longitudes; it leaves out the last of 4n + 1 latitudes.
        steps: Steps of six hours to forecast.
        num_train: Number of training samples; None: all that the others leave, of files.
        num_val: Number of validation samples.
        num_test: Number of test samples; `predict` reads them, too.
        batch_size: Samples per data-parallel rank and step.
        seed: The seed of made-up weather.
        num_workers: Worker processes per loader.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.

    Raises:
        ValueError: A number is too small, or some of three files are named.
    """

    def __init__(
        self,
        surface: str | None = None,
        atmospheric: str | None = None,
        static: str | None = None,
        names: dict[str, str] | None = None,
        levels: Sequence[int] = (250, 500, 850),
        resolution: tuple[int, int] = (33, 64),
        steps: int = 2,
        num_train: int | None = None,
        num_val: int = 8,
        num_test: int = 8,
        batch_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, steps=steps, num_train=num_train, batch_size=batch_size, levels=levels)
        at_least(0, num_val=num_val, num_test=num_test, num_workers=num_workers, seed=seed)
        files = {"surface": surface, "atmospheric": atmospheric, "static": static}
        if any(files.values()) and not all(files.values()):
            missing = [name for name, path in files.items() if not path]
            raise ValueError(
                f"ERA5 comes in three files; {' and '.join(missing)} is missing. Name all of "
                "surface, atmospheric and static, or none for made-up weather."
            )
        self.save_hyperparameters()
        self.files: dict[str, Any] = files
        self.names, self.levels, self.seed = names, tuple(levels), seed
        self.resolution, self.steps = resolution, steps
        self.numbers: dict[str, int | None] = {"train": num_train, "val": num_val, "test": num_test}
        self.batch_size = batch_size
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}

    @override
    def setup(self, stage: str) -> None:
        optional("aurora", "AuroraDataModule", "aurora")
        source: Source
        if self.files["surface"] is None:
            source = Waves(*self.resolution, self.levels, self.seed)
        else:
            source = Era5(**self.files, levels=self.levels, names=self.names)
        length = HISTORY + self.steps
        self.datasets = {
            name: WeatherDataset(source, starts, length, getattr(self, "trainer", None))
            for name, starts in self._starts(source, length).items()
        }

    def _starts(self, source: Source, length: int) -> dict[str, range]:
        """The first states of the windows: no two sets have a state in common.

        Raises:
            ValueError: There are not so many states.
        """
        val, test = self.numbers["val"] or 0, self.numbers["test"] or 0
        others = sum(number + length - 1 for number in (val, test) if number)
        train = self.numbers["train"]
        if train is None:
            train = 64 if source.steps is None else source.steps - others - length + 1
        needed = train + length - 1 + others
        if train < 1 or (source.steps is not None and source.steps < needed):
            raise ValueError(
                f"{max(train, 1)} training, {val} validation and {test} test windows of {length} "
                f"states need {max(train, 1) + length - 1 + others} states; the files have "
                f"{source.steps}. Ask for fewer samples or steps."
            )
        found, start = dict[str, range](), 0
        for name, number in (("train", train), ("val", val), ("test", test)):
            found[name] = range(start, start + number)
            start += number + length - 1 if number else 0
        return found

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train", shuffle=True)

    @override
    def val_dataloader(self) -> Any:
        return self._loader("val") if len(self.datasets["val"]) else []

    @override
    def test_dataloader(self) -> Any:
        return self._loader("test") if len(self.datasets["test"]) else []

    @override
    def predict_dataloader(self) -> Any:
        return self.test_dataloader()

    def _loader(self, name: str, *, shuffle: bool = False) -> DataLoader[Any]:
        dataset = self.datasets[name]
        return make_loader(
            dataset,
            self.batch_size,
            shuffle=shuffle,
            collate_fn=dataset.collate,
            **self.loading,
        )
