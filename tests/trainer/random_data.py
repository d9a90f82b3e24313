"""The data of a drawn training, for one process or for one of several data replicas."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from tests.trainer.random_trainings import SEVERAL, Training
from tests.training import Fields

BATCH = 4  # samples that one process reads in a step


def sample(index: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, 1, 7, 6, generator=numbers, dtype=torch.float64)
    return {"x": x, "y": y}


@dataclass
class Pair:
    """A batch with attributes."""

    x: Tensor
    y: Tensor


class Stream(IterableDataset):
    """Whole batches; each replica makes its own part of each."""

    def __init__(self, batches: int, make: Callable[[int], Any]) -> None:
        self.batches, self.make = batches, make

    def __iter__(self) -> Iterator[Any]:
        return (self.make(index) for index in range(self.batches))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.batches


def formed(kind: str, items: list[dict[str, Tensor]]) -> Any:
    """A batch of `items` in the form of `kind`."""
    batch = torch.utils.data.default_collate(items)
    match kind:
        case "dict":
            return batch
        case "tuple":
            return batch["x"], batch["y"]
        case "tensor":
            return torch.cat((batch["x"], batch["y"]), 1)
        case "nested":
            return {"in": [batch["x"], {"name": "x"}], "out": {"y": (batch["y"], 3)}}
        case _:
            return Pair(batch["x"], batch["y"])


def fields_of(batch: Any) -> tuple[Tensor, Tensor]:
    """`x` and `y` of a batch in any form."""
    if isinstance(batch, Pair):
        return batch.x, batch.y
    if isinstance(batch, Tensor):
        return batch[:, :1].contiguous(), batch[:, 1:].contiguous()
    if isinstance(batch, Mapping):
        return (batch["x"], batch["y"]) if "x" in batch else (batch["in"][0], batch["out"]["y"][0])
    return batch[0], batch[1]


@dataclass
class Data:
    """Loaders of a drawn training, of one of several data replicas.

    Args:
        drawn: The training.
        replicas: Number of data replicas.
        replica: Which of them reads streams here; the strategy divides other datasets.
    """

    drawn: Training
    replicas: int = 1
    replica: int = 0

    @property
    def size(self) -> int:
        """Samples of a batch here."""
        return BATCH // self.replicas

    def loader(self, kind: str, count: int, first: int = 0) -> Any:
        size, data = self.size, Fields(lambda index: sample(first + index), count)
        options: dict[str, Any] = {"collate_fn": partial(formed, self.drawn["batch"])}
        if self.drawn["workers"]:
            # those that persist draw a number when they first begin, also in a resumed run
            persist = bool(count % 4) and not self.drawn["resume"]
            options |= {"num_workers": 1, "persistent_workers": persist}
        if kind != "batch_sampler":
            options["drop_last"] = self.drawn["drop_last"]
        match kind:
            case "shuffle":
                return DataLoader(data, size, shuffle=True, **options)
            case "weighted":
                weights = WeightedRandomSampler(torch.arange(1.0, count + 1).tolist(), count)
                return DataLoader(data, size, sampler=weights, **options)
            case "random_sampler":
                numbers = torch.Generator().manual_seed(4)
                drawn = RandomSampler(data, replacement=True, num_samples=8, generator=numbers)
                return DataLoader(data, size, sampler=drawn, **options)
            case "batch_sampler":
                batches = BatchSampler(RandomSampler(data), size, drop_last=True)
                return DataLoader(data, batch_sampler=batches, **options)
            case "stream" | "sized_stream":
                made = {"stream": Stream, "sized_stream": SizedStream}[kind]
                stream = made(count // BATCH, self._made_of(first))
                return DataLoader(stream, batch_size=None)
            case "whole":
                made = Fields(partial(self._batch, first), count // BATCH * self.replicas)
                return DataLoader(made, batch_size=None)
            case "distributed":
                place = {"num_replicas": self.replicas, "rank": self.replica, "shuffle": False}
                return DataLoader(data, size, sampler=DistributedSampler(data, **place), **options)
            case _:
                return DataLoader(data, size, **options)

    def _batch(self, first: int, number: int) -> Any:
        """A batch of neighbours; replicas take turns."""
        here = range(first + number * self.size, first + (number + 1) * self.size)
        return formed(self.drawn["batch"], [sample(i) for i in here])

    def _made_of(self, first: int) -> Callable[[int], Any]:
        def make(batch: int) -> Any:
            here = range(first + batch * BATCH + self.replica, first + (batch + 1) * BATCH)
            return formed(self.drawn["batch"], [sample(i) for i in here[:: self.replicas]])

        return make

    def training(self) -> Any:
        kind, count = self.drawn["training_data"], self.drawn["samples"]
        first = self.loader("shuffle" if kind in ("dict", "max_size") else kind, count)
        other = None
        if kind in SEVERAL:
            other = self.loader("shuffle" if kind == "list" else "plain", 8, 100)
        match kind:
            case "dict":
                return {"a": first, "b": other}
            case "list":
                return [first, other]
            case "min_size":
                return CombinedLoader({"a": first, "b": other}, kind)
            case "max_size":
                return CombinedLoader({"a": first, "b": other}, "max_size_cycle")
        return first

    def validation(self) -> Any:
        kind = self.drawn["validation_data"]
        if kind == "none":
            return None
        first = self.loader(kind, self.drawn["validation_samples"], 200)
        if kind == "two":
            return [first, self.loader("plain", 12, 300)]
        return first

    def testing(self) -> Any:
        first = self.loader("plain", self.drawn["test_samples"], 400)
        return [first, self.loader("plain", 4, 500)] if self.drawn["test_data"] == "two" else first


class GivesLoaders(LightningDataModule):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> Any:
        return self.data.training()

    def val_dataloader(self) -> Any:
        found = self.data.validation()
        return [] if found is None else found

    def test_dataloader(self) -> Any:
        return self.data.testing()

    def predict_dataloader(self) -> Any:
        return self.data.testing()
