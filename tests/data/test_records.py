"""Batches that are dataclasses, and blocks that take and give them."""

import dataclasses
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_shard import gather, shard
from lightning_shard.data.local import LocalPart
from lightning_shard.data.same_batch import check_same_batch
from lightning_shard.data.split import shard_batch
from lightning_shard.data.tree import map_leaves
from lightning_shard.trainer.split_summary import split_summary
from tests import training
from tests.parity import mesh_of
from tests.trainer.featured import QUIET, assert_same_state
from tests.training import Fields, generator


@dataclasses.dataclass
class Grid:
    latitudes: Tensor
    time: str = "noon"

    def __post_init__(self):
        assert self.latitudes.ndim == 1


@dataclasses.dataclass
class State:
    """As Aurora's batch: dicts of fields, constant ones, and where they are."""

    fields: dict[str, Tensor]
    land: Tensor
    grid: Grid
    made: ClassVar[int] = 0

    def __post_init__(self):
        type(self).made += 1

    def to(self, device):
        fields = {name: x.to(device) for name, x in self.fields.items()}
        return State(fields, self.land.to(device), self.grid)

    @cached_property
    def rows(self):
        return self.fields["t"].sum(-1)


def state(height=9):
    fields = {"t": torch.randn(2, 2, height, 6), "q": torch.randn(2, 2, 3, height, 6)}
    return State(fields, torch.randn(height, 6), Grid(torch.linspace(90, -90, height)))


@pytest.mark.spmd(2)
def test_fields_of_a_dataclass_are_entries():
    torch.manual_seed(0)
    batch = state()
    before, whole = State.made, batch.rows
    split = shard_batch(batch, mesh_of(2), -2)
    assert str(split_summary(split)) == (
        "split over the domain: fields.t (dim 2), fields.q (dim 3); "
        "whole: land (float32), grid.latitudes (float32)"
    )
    assert (type(split), State.made, split.grid.time) == (State, before, "noon")
    assert gather(split.rows).equal(whole)  # not what the whole batch had computed
    assert batch.fields["t"].shape == (2, 2, 9, 6), "the batch itself has changed"
    split = shard_batch(batch, mesh_of(2), {"fields": -2, "land": 0, "grid": None})
    assert split_summary(split).split == {"fields.t": (2,), "fields.q": (3,), "land": (0,)}
    nested = shard_batch({"now": [batch], "x": torch.zeros(2, 3, 5)}, mesh_of(2), -2)
    assert set(split_summary(nested).split) == {"now.0.fields.t", "now.0.fields.q", "x"}
    with pytest.raises(ValueError, match=r"entry 'field', but the batch has \['fields', 'land', "):
        shard_batch(batch, mesh_of(2), {"field": -2})


@pytest.mark.spmd(2)
def test_maps_in_a_dataclass_follow_its_fields():
    batch = {"all": Pair(torch.zeros(2, 3, 9, 7), torch.zeros(2, 9, 7, dtype=torch.int64))}
    split = shard_batch(batch, mesh_of(2))
    assert split_summary(split).split == {"all.image": (2,), "all.classes": (1,)}


@dataclasses.dataclass(frozen=True)
class Pair:
    image: Tensor
    classes: Tensor


@pytest.mark.spmd(2)
def test_ranks_that_read_different_dataclasses_are_told():
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(ValueError, match=r"read different batches \(entry \['now'\]\['fields'\]"):
        check_same_batch({"now": state()}, mesh_of(2))


@pytest.mark.spmd(2)
def test_parts_in_a_dataclass_that_moves_itself():
    rank = torch.distributed.get_rank()
    rows = torch.full((3, 2 - rank, 4), float(rank))
    part = default_collate([LocalPart(rows, (3, 3, 4), (7,))])
    batch = State({"t": part}, torch.zeros(3, 4), Grid(torch.zeros(3))).to("cpu")
    t = shard_batch(batch, mesh_of(2), -2).fields["t"]
    assert gather(t)[0, 0, :, 0].tolist() == [0, 0, 1]


@pytest.mark.spmd(2)
def test_what_has_not_changed_stays_the_same_object():
    batch = state()
    held = {"a": [batch], "x": shard(torch.zeros(4, 4), mesh_of(2), 0)}
    same = map_leaves(lambda x: x, held)
    assert same["a"][0] is batch
    other = map_leaves(lambda x: x + 1 if isinstance(x, Tensor) else x, held)
    assert other["a"][0].land.equal(batch.land + 1)
    assert other["a"][0].grid.time == "noon"


class Layer(nn.Module):
    """Takes a record and gives one."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, state, scale=1.0):
        t = self.convolution(state.fields["t"]) * scale + state.land
        return dataclasses.replace(state, fields=state.fields | {"t": t})


class Forecast(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Layer() for _ in range(3)).double()

    def training_step(self, batch, batch_idx):
        state = batch
        for layer in self.layers:
            state = layer(state, scale=0.9)
        return (state.fields["t"] - batch.fields["t"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def sample(index):
    return torch.randn(2, 9, 6, generator=generator(index), dtype=torch.float64)


def collate(samples):
    grid = Grid(torch.linspace(90, -90, 9, dtype=torch.float64))
    return State({"t": torch.stack(samples)}, torch.ones(9, 6, dtype=torch.float64), grid)


@pytest.mark.quick_rows("2")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2,), marks=pytest.mark.spmd(2), id="2"),
        pytest.param((2, 2), marks=pytest.mark.spmd(4), id="2x2"),
    ],
)
def test_training_blocks_of_records_is_exact(shape):
    data = DataLoader(Fields(sample, 8), 2, collate_fn=collate)
    alone, module = Forecast(), Forecast()
    Trainer(devices=1, plugins=LightningEnvironment(), **QUIET).fit(alone, data)
    strategy = {"shard_dims": {"fields": (2, 3)[: len(shape)], "land": (0, 1)[: len(shape)]}}
    strategy |= {"wrap": ["Layer"]}
    runner = training.trainer(shape, strategy=strategy, use_distributed_sampler=False)
    runner.fit(module, data)
    assert_same_state(module, alone)
