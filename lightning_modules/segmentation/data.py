"""Volumes with labels, made up or read from NIfTI files, of which each rank holds its part."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from typing_extensions import override

from lightning_modules.segmentation.phantoms import Phantoms
from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_shard import VolumeDataset, slab_of

Sample = dict[str, Any]


class PhantomDataset(Dataset[Sample]):
    """Samples `{"image": (1, X, Y, Z), "label": (1, X, Y, Z)}` that are made up.

    Each process makes its part of a volume once, and keeps it.

    Args:
        phantoms: The source of volumes.
        count: Number of samples.
        trainer: The trainer that will use the samples; None for whole volumes.
    """

    def __init__(self, phantoms: Phantoms, count: int, trainer: Trainer | None = None) -> None:
        self.phantoms = phantoms
        shapes = [(1, *phantoms.shape(index)) for index in range(count)]
        self.slabs = [
            {key: slab_of(trainer, key, shape) for key in ("image", "label")} for shape in shapes
        ]
        self._made: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.slabs)

    @override
    def __getitem__(self, index: int) -> Sample:
        if index not in self._made:
            make = {"image": self.phantoms.image, "label": self.phantoms.label}
            self._made[index] = {
                key: slab.part(make[key](index, slab.index[1:])[None], index)
                for key, slab in self.slabs[index].items()
            }
        return self._made[index]


class SegmentationDataModule(LightningDataModule):
    """Volumes of NIfTI files, or of made-up phantoms where no files are named.

    Validation and test volumes are the last ones; `predict` reads the test volumes, or all images
    where there are no labels.

    Args:
        images: A folder of NIfTI files, or one file; None makes volumes up. With several channels,
            a file has them as its fourth dim.
        labels: A folder or a file of the labels, in the same order of names.
        extents: Voxels of made-up volumes along each dim.
        vary: By how many voxels less, at most, a made-up volume extends along each dim.
        noise: Standard deviation of their noise; an organ's brightness is 1.
        num_train: Number of training volumes; None: all that the others leave, of files, and 32
            made-up ones.
        num_val: Number of validation volumes.
        num_test: Number of test volumes.
        batch_size: Volumes per data-parallel rank and step; more than one need one grid.
        seed: The seed of made-up volumes.
        num_workers: Worker processes per loader.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.

    Raises:
        ValueError: A number is too small, or labels are named without images.
    """

    def __init__(
        self,
        images: str | None = None,
        labels: str | None = None,
        extents: tuple[int, int, int] = (36, 30, 26),
        vary: int = 0,
        noise: float = 0.2,
        num_train: int | None = None,
        num_val: int = 4,
        num_test: int = 8,
        batch_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        at_least(1, num_train=num_train, batch_size=batch_size)
        at_least(0, num_val=num_val, num_test=num_test, num_workers=num_workers)
        if labels and not images:
            raise ValueError(f"labels {labels} need images; name both, or none for made-up ones.")
        self.save_hyperparameters()
        self.images, self.labels = images, labels
        self.phantoms = Phantoms(extents, vary, noise, seed)
        self.numbers = {"train": num_train, "val": num_val, "test": num_test}
        self.batch_size = batch_size
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}

    @override
    def setup(self, stage: str) -> None:
        trainer = getattr(self, "trainer", None)
        if self.images and not self.labels:
            if stage != "predict":
                raise ValueError(
                    f"{stage} needs labels beside the images {self.images}; without them there is "
                    "only predict."
                )
            whole = VolumeDataset({"image": self.images}, trainer)
            self.datasets = {"test": Subset(whole, range(len(whole)))}
            return
        self.datasets = self._divided(trainer)

    def _divided(self, trainer: Trainer | None) -> dict[str, Subset[Sample]]:
        whole: Any = None
        if self.images and self.labels:
            whole = VolumeDataset({"image": self.images, "label": self.labels}, trainer)
        val, test = self.numbers["val"] or 0, self.numbers["test"] or 0
        train = self.numbers["train"]
        if train is None:
            train = 32 if whole is None else len(whole) - val - test
        ends = {"train": train, "val": train + val, "test": train + val + test}
        if whole is None:
            whole = PhantomDataset(self.phantoms, ends["test"], trainer)
        if train < 1 or ends["test"] > len(whole):
            raise ValueError(
                f"{self.images} has {len(whole)} volumes, too few for {max(train, 1)} of training, "
                f"{val} of validation and {test} of test; lower num_train, num_val or num_test."
            )
        starts = {"train": 0, "val": ends["train"], "test": ends["val"]}
        return {name: Subset(whole, range(starts[name], end)) for name, end in ends.items()}

    @override
    def train_dataloader(self) -> DataLoader[Sample]:
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

    def _loader(self, name: str, *, shuffle: bool = False) -> DataLoader[Sample]:
        return make_loader(
            self.datasets[name],
            self.batch_size,
            shuffle=shuffle,
            collate_fn=_collate,
            **self.loading,
        )


def _collate(samples: Sequence[Sample]) -> Any:
    """Make a batch of volumes.

    Raises:
        ValueError: Their grids differ.
    """
    shapes = {tuple(sample["image"].shape) for sample in samples}
    if len(shapes) > 1:
        raise ValueError(
            f"the volumes of a batch must have one grid; got {' and '.join(map(str, shapes))}. Use "
            "batch_size: 1, or volumes of one grid."
        )
    return default_collate(list(samples))
