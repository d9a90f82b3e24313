"""Finds the batches on which each step of a module is rehearsed."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_shard.data.file_field import FileField
from lightning_shard.data.tree import map_leaves
from lightning_shard.lightning import LightningDataModule, LightningModule, is_overridden
from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.narrow import is_list
from lightning_shard.processes.torch_private.typed import random, typed_torch

Data = LightningDataModule | DataLoader[Any]
Stage = Literal["fit", "validate", "test", "predict"]

# the module's step in each stage, and the hook that gives its loaders
STEPS: dict[Stage, tuple[str, str]] = {
    "fit": ("training_step", "train_dataloader"),
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_step", "predict_dataloader"),
}

_EMPTY = "the DataLoader of training batches has no batch."


class NotRehearsedError(LightningShardError):
    """A step cannot be rehearsed; the message says why."""


def copy_of(module: LightningModule) -> LightningModule:
    """Return a deep copy of a module that shares its datasets, whose open files have no copy.

    What it has computed of parameters, as `weight_norm` does, is copied without its graph.
    """
    owned = [vars(part) for part in module.modules()]
    known: dict[int, Any] = {id(x): x for x in _held(owned)}
    values = (x for own in owned for x in own.values() if isinstance(x, Tensor))
    known |= {id(x): copy.deepcopy(x.detach()) for x in values if not x.is_leaf}
    return copy.deepcopy(module, known)


def _held(value: Any) -> Iterator[Dataset[Any] | DataLoader[Any]]:
    if isinstance(value, Dataset | DataLoader):
        yield value
    elif type(value) in (list, tuple, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _held(each)


def has_own_loaders(module: LightningModule, data: Data, stage: Stage) -> bool:
    """Return whether `data`, or else the module, has loaders of the stage."""
    return is_overridden(STEPS[stage][1], _owner(module, data))


def stages_of(module: LightningModule) -> list[Stage]:
    """Return the stages besides training for which the module defines a step."""
    others: tuple[Stage, ...] = ("validate", "test", "predict")
    return [stage for stage in others if is_overridden(STEPS[stage][0], module)]


def first_batches(module: LightningModule, data: Data, stage: Stage) -> list[Any]:
    """Return the first batch of each loader of the stage, the same in every call.

    A lone DataLoader gives its batch to all stages for which the module has no loaders.

    Raises:
        ValueError: There is no DataLoader of training batches, or it is empty.
        NotRehearsedError: There are no batches of another stage.
    """
    with random.fork_rng(devices=[]):
        typed_torch.manual_seed(0)
        if stage != "fit" and has_own_loaders(module, data, stage):
            return _of_own_loaders(_owner(module, data), stage)
        if isinstance(data, LightningDataModule) and stage != "fit":
            raise NotRehearsedError(f"{type(data).__name__} has no {STEPS[stage][1]}")
        if found := _one(_of_training(data)):
            return found
        raise ValueError(_EMPTY)


def pins_batches(data: Data) -> bool:
    """Return whether the loader of training batches puts them into pinned memory."""
    loader: Any = data if isinstance(data, DataLoader) else data.train_dataloader()
    return bool(getattr(loader, "pin_memory", False))


def batches_in_turn(data: Data, count: int) -> list[Any]:
    """Return the first training batches; the loader begins anew where it has fewer.

    Raises:
        ValueError: There is no DataLoader of training batches, or it is empty.
    """
    with random.fork_rng(devices=[]):
        typed_torch.manual_seed(0)
        loader, found = _of_training(data), list[Any]()
        while len(found) < count:
            drawn = list(itertools.islice(iter(loader), count - len(found)))
            if not drawn:
                raise ValueError(_EMPTY)
            found += drawn
        return found


def kind_of(given: Any) -> str:
    """Name the class of an argument; a class itself was given where an object was meant."""
    if isinstance(given, type):
        return f"the class {given.__name__}; write {given.__name__}()"
    return type(given).__name__


def _of_training(data: Data) -> DataLoader[Any]:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
    loader: Any = data.train_dataloader() if isinstance(data, LightningDataModule) else data
    if not isinstance(loader, DataLoader):
        raise ValueError(
            "a LightningDataModule, or one DataLoader of training batches, is needed; got "
            f"{kind_of(loader)}."
        )
    return loader


def _of_own_loaders(owner: Any, stage: Stage) -> list[Any]:
    try:
        if isinstance(owner, LightningDataModule):
            owner.prepare_data()
            owner.setup("fit" if stage == "validate" else stage)
        loaders: Any = getattr(owner, STEPS[stage][1])()
        several: list[Any] = list(loaders) if is_list(loaders) else [loaders]
        found = list(itertools.chain.from_iterable(map(_one, several)))
    except Exception as error:  # the user's code, which may lack files here: said, not hidden
        raise NotRehearsedError(f"its batches: {type(error).__name__}: {error}") from error
    if len(found) < len(several) or not found:
        raise NotRehearsedError("a loader has no batch")
    return found


def _one(loader: Any) -> list[Any]:
    return [_in_memory(batch) for batch in itertools.islice(iter(loader), 1)]


def _in_memory(batch: Any) -> Any:
    """Return a batch in which fields that tiles read are tensors without memory."""

    def stand_in(leaf: Any) -> Any:
        return leaf.without_values() if isinstance(leaf, FileField) else leaf

    return map_leaves(stand_in, batch)


def _owner(module: LightningModule, data: Data) -> LightningDataModule | LightningModule:
    return data if isinstance(data, LightningDataModule) else module
