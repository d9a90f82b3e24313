"""Which entries of a batch a domain splits, that a run says so, and that the numbers are right."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning_utilities.core import rank_zero as rank_zero_module
from torch import nn
from torch.utils.data import DataLoader, default_collate

from lightning_shard import FieldDataset, gather, slab_of, write_fields
from lightning_shard.data.same_batch import check_same_batch
from lightning_shard.data.split import shard_batch
from lightning_shard.trainer.split_summary import split_summary
from tests import training
from tests.parity import mesh_of
from tests.trainer.featured import QUIET, assert_same_state
from tests.training import Fields, generator


def summary_of(batch, axes=(2,), shard_dims=None):
    return str(split_summary(shard_batch(batch, mesh_of(*axes), shard_dims)))


@pytest.mark.spmd(2)
def test_maps_follow_the_field_whose_extents_they_have():
    batch = {
        "image": torch.zeros(2, 3, 9, 7),
        "classes": torch.zeros(2, 9, 7, dtype=torch.int64),
        "mask": torch.zeros(2, 1, 9, 7, dtype=torch.bool),
        "depth": torch.zeros(2, 9, 7),  # by itself it would be 9 channels of 7 nodes
        "other": torch.zeros(2, 5, 7, dtype=torch.int64),
        "label": torch.zeros(2, dtype=torch.int64),
    }
    assert summary_of(batch) == (
        "split over the domain: image (dim 2), classes (dim 1), mask (dim 2), depth (dim 1); "
        "whole: other (int64), label (int64)"
    )
    assert summary_of((batch["image"], {"a": batch["classes"]}), shard_dims=3) == (
        "split over the domain: 0 (dim 3), 1.a (dim 2)"
    )
    chosen = {"image": 2, "classes": None}
    assert summary_of(batch, shard_dims=chosen).startswith("split over the domain: image (dim 2); ")
    assert summary_of(batch["label"]) == "split over the domain: nothing; whole: batch (int64)"


@pytest.mark.spmd(4)
def test_maps_are_split_in_as_many_dims():
    batch = [torch.zeros(2, 3, 9, 7), torch.zeros(2, 9, 7, dtype=torch.int64)]
    assert summary_of(batch, (2, 2)) == "split over the domain: 0 (dims 2, 3), 1 (dims 1, 2)"
    part = shard_batch(batch, mesh_of(2, 2))[1].to_local()
    assert part.shape[1] < 9
    assert part.shape[2] < 7


def odd_tensors():
    field = torch.arange(40.0).reshape(1, 2, 5, 4)
    return {
        "coordinates": field.to_sparse(),
        "rows": torch.eye(4).to_sparse_csr(),
        "ragged": torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(4, 3)]),
        "jagged": torch.nested.nested_tensor([field[0], field[0]], layout=torch.jagged),
        "conjugate": torch.complex(field, -field).conj(),
        "imaginary": torch.complex(field, -field).conj().imag,
    }


@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) st")
def test_sparse_and_nested_tensors_are_compared_and_stay_whole():
    batch, mesh = odd_tensors() | {"x": torch.zeros(1, 2, 5, 4)}, mesh_of(2)
    check_same_batch(batch, mesh)
    split = shard_batch(batch, mesh)
    assert {*split_summary(split).split} == {"x", "conjugate", "imaginary"}
    assert split["coordinates"] is batch["coordinates"]
    with pytest.raises(ValueError, match="'coordinates', but no rows can be cut out of a sparse"):
        shard_batch(batch, mesh, {"x": 2, "coordinates": 2})
    dense = batch | {"coordinates": batch["coordinates"].to_dense()}
    assert "coordinates" in split_summary(shard_batch(dense, mesh, {"coordinates": 2})).split
    for name, value in odd_tensors().items():
        other = value if torch.distributed.get_rank() else value * 3
        with pytest.raises(ValueError, match=rf"different batches \(entry \['{name}'\]"):
            check_same_batch({name: other}, mesh)


class Scales(LightningModule):
    """Normalizes what it is given, in a hook and in another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Conv2d(2, 2, 3, padding=1).double()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        mean, scale = torch.tensor([[[0.5]], [[2.0]]], dtype=torch.float64), 3
        return {**batch, "x": (batch["x"].double() - mean) / scale}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {
            **batch,
            "x": 1 - 2 * batch["x"] + batch["x"] * torch.ones(1, 1, dtype=torch.double),
        }

    def training_step(self, batch, batch_idx):
        return (self.network(batch["x"]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Parts(LightningDataModule):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def setup(self, stage):
        self.fields = FieldDataset(self.path, ["x"], trainer=self.trainer)

    def train_dataloader(self):
        return DataLoader(self.fields, 2)


@pytest.mark.spmd(2)
def test_parts_are_normalized_as_whole_fields_are():
    path = training.shared_path("x.zarr")
    if torch.distributed.get_rank() == 0:
        x = torch.randn(4, 2, 9, 7, generator=generator(0))
        write_fields(path, 4, [{"x": x.numpy()}])
    torch.distributed.barrier()
    alone, module = Scales(), Scales()
    Trainer(devices=1, plugins=LightningEnvironment(), **QUIET).fit(alone, Parts(path))
    training.trainer((2,), use_distributed_sampler=False).fit(module, Parts(path))
    assert_same_state(module, alone)


@pytest.mark.spmd(2)
def test_what_parts_cannot_do_is_said():
    slab = slab_of(mesh_of(2), "x", (2, 9, 7))
    rows = [slice(part.start, part.stop) for part in slab.index]
    part = slab.part(torch.arange(126.0).reshape(2, 9, 7)[rows], sample=0)
    said = r"not whole on any rank .* until the batch has been split, so it .* in the step"
    for use in (
        lambda: part.mean(),
        lambda: part[0],
        lambda: torch.stack([part]),
        lambda: torch.sin(part),
    ):
        with pytest.raises((TypeError, AttributeError), match=said):
            use()
    with pytest.raises(TypeError, match=r"tensor of shape \(9, 7\) does not fit it; compute with"):
        part + torch.zeros(9, 7)
    doubled = default_collate([torch.ones(2, 1, 1) + part + part])
    assert (doubled.ndim, len(doubled)) == (4, 1)
    whole = gather(shard_batch(doubled, mesh_of(2)))
    assert whole.equal(2 * torch.arange(126.0).reshape(1, 2, 9, 7) + 1)


class Segments(LightningModule):
    """Classes of pixels, some of which do not count, beside a weight map."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)
        ).double()

    def training_step(self, batch, batch_idx):
        logits = self.network(batch["image"])
        by_class = F.cross_entropy(logits, batch["classes"], ignore_index=3)
        probability = logits.softmax(1).gather(1, batch["classes"][:, None])
        hit = (logits.argmax(1) == batch["classes"]) & batch["valid"]
        self.log("hits", hit.sum().double(), on_step=False, on_epoch=True, sync_dist=True)
        return by_class + torch.where(batch["valid"], 1 - probability[:, 0], 0).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True, batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def segments(index):
    of = generator(index)
    return {
        "image": torch.randn(2, 9, 7, generator=of, dtype=torch.float64),
        "classes": torch.randint(0, 4, (9, 7), generator=of),
        "valid": torch.rand(9, 7, generator=of) > 0.3,
    }


@pytest.mark.quick_rows("2")
@pytest.mark.parametrize(
    "domain",
    [
        pytest.param((2,), marks=pytest.mark.spmd(2), id="2"),
        pytest.param((4,), marks=pytest.mark.spmd(4), id="4"),
        pytest.param((2, 2), marks=pytest.mark.spmd(4), id="2x2"),
    ],
)
def test_training_on_class_maps_is_exact(domain):
    data = [DataLoader(Fields(segments, 12), 4) for _ in range(2)]
    seen = []

    class Seen(Segments):
        def training_step(self, batch, batch_idx):
            seen.append(split_summary(batch))
            return super().training_step(batch, batch_idx)

    alone, module = Segments(), Seen()
    Trainer(devices=1, plugins=LightningEnvironment(), **QUIET).fit(alone, *data)
    training.trainer(domain, use_distributed_sampler=False).fit(module, *data)
    assert set(seen[0].split) == {"image", "classes", "valid"}
    assert_same_state(module, alone)


@pytest.mark.spmd(2)
def test_a_run_says_what_is_split():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = rank_zero_module.log  # of pytorch_lightning where that was imported later
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    runner = training.trainer((2,), max_epochs=2)
    runner.fit(Segments(), *[DataLoader(Fields(segments, 4), 2) for _ in range(2)])
    logger.removeHandler(handler)
    lines = [line for line in said if "over the domain" in line]
    first = runner.global_rank == 0
    assert lines == first * [
        "split over the domain: image (dim 2), classes (dim 1), valid (dim 1)"
    ], said


class Tokens(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch["ids"]).transpose(1, 2), batch["ids"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.spmd(2)
def test_a_domain_that_splits_nothing_is_warned_of():
    data = DataLoader([{"ids": torch.arange(8) + i} for i in range(2)], 1)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        runner = training.trainer((2,))
        runner.fit(Tokens(), data)
    found = [str(w.message) for w in noted if "nothing of the batch is split" in str(w.message)]
    assert len(found) == (runner.global_rank == 0)
    for text in found:
        assert "2 ranks share each sample" in text
        assert "shard_dims={'ids': 1}" in text
