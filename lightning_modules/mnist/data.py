"""Handwritten digits as a LightningDataModule: scikit-learn's, offline, or MNIST from a folder.

Both sources fit into memory and are served as tensors. Shapes: B samples per data-parallel rank,
images (B, 1, 28, 28) float32, labels (B,) int64.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_modules.shared.loading import make_loader
from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.optional import optional

_MEAN_STD = {"digits": (0.3053, 0.3247), "mnist": (0.1307, 0.3081)}  # pixels lie in [0, 1]
_DIGITS_TEST_FRACTION = 0.2  # MNIST comes with a test set of its own


class MNISTDataModule(LightningDataModule):
    """Images of handwritten digits and their labels, as batches `(images, labels)`.

    Args:
        source: "digits" for scikit-learn's 1797 images of 8 x 8 pixels, enlarged to 28 x 28, which
            need no download; "mnist" for the 70000 images of MNIST.
        root: Folder that holds `MNIST/raw`, for source "mnist".
        download: Fetch MNIST into `root` where it is missing.
        batch_size: Training samples per data-parallel rank and step.
        eval_batch_size: Validation, test and prediction samples per data-parallel rank and step.
        val_fraction: Part of the training set that is held out for validation. With 0 nothing is
            held out, and the test set validates each epoch, as in PyTorch's example.
        seed: Decides which samples are held out; the same seed gives the same split.
        num_workers: Processes that load batches; 0 loads them in the training process.
        pin_memory: True puts batches into page-locked memory where there is an accelerator.
    """

    def __init__(
        self,
        source: Literal["digits", "mnist"] = "digits",
        root: str | Path = "data",
        download: bool = False,
        batch_size: int = 64,
        eval_batch_size: int = 1000,
        val_fraction: float = 0.15,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__()
        if source not in _MEAN_STD:
            raise ValueError(f"source must be 'digits' or 'mnist'; got {source!r}.")
        if not 0 <= val_fraction < 1:
            raise ValueError(
                f"val_fraction must be at least 0 and below 1; got {val_fraction}. With 0 the test "
                "set validates."
            )
        at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        at_least(0, num_workers=num_workers)
        self.source = source
        self.root = Path(root)
        self.download = download
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.loading: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        self.splits: dict[str, TensorDataset] = {}

    @override
    def prepare_data(self) -> None:
        if self.source == "mnist" and self.download:
            from torchvision.datasets import MNIST  # the default source works without torchvision

            MNIST(self.root, download=True)

    @override
    def setup(self, stage: str) -> None:
        if self.splits:
            return
        generator = torch.Generator().manual_seed(self.seed)
        if self.source == "digits":
            rest, test = _hold_out(_read_digits(), _DIGITS_TEST_FRACTION, generator)
        else:
            rest, test = _read_mnist(self.root, train=True), _read_mnist(self.root, train=False)
        train, val = rest, test
        if self.val_fraction:
            train, val = _hold_out(rest, self.val_fraction, generator)
        mean, std = _MEAN_STD[self.source]
        self.splits = {
            name: TensorDataset((images - mean) / std, labels)
            for name, (images, labels) in (("train", train), ("val", val), ("test", test))
        }

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("train", self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("val", self.eval_batch_size)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test", self.eval_batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._loader("test", self.eval_batch_size)

    def _loader(
        self, split: str, batch_size: int, *, shuffle: bool = False
    ) -> DataLoader[tuple[Tensor, ...]]:
        return make_loader(self.splits[split], batch_size, shuffle=shuffle, **self.loading)


def _hold_out(
    samples: tuple[Tensor, Tensor], fraction: float, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split samples at random into the rest and a held-out `fraction` of at least one."""
    images, labels = samples
    order = torch.randperm(len(labels), generator=generator)
    size = max(1, round(fraction * len(labels)))
    held_out, rest = order[:size], order[size:]
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def _read_digits() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's digits, enlarged to (N, 1, 28, 28) in [0, 1]."""
    datasets = optional("sklearn.datasets", "source: digits")  # takes seconds to import
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    return images, torch.as_tensor(labels, dtype=torch.int64)


def _read_mnist(root: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Read one part of MNIST as (N, 1, 28, 28) in [0, 1]."""
    from torchvision.datasets import MNIST  # the default source works without torchvision

    folder = root / "MNIST" / "raw"
    missing = [
        stem for name, _ in MNIST.resources if not (folder / (stem := Path(name).stem)).is_file()
    ]
    if missing:
        raise FileNotFoundError(
            f"MNIST needs the file {missing[0]} in {folder}, which is not there: set `download:"
            " true` to fetch it, or `source: digits` to train offline on scikit-learn's digits."
        )
    data = MNIST(root, train=train)
    return data.data.unsqueeze(1).float() / 255, data.targets.long()
