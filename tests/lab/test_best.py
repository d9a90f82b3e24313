"""The best mesh: what is listed, pruned, ranked and written, with a stand-in for the prediction."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, ShardingOptions, TiledStrategy
from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lab import search
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.extents import extents_of
from lightning_shard.lab.ranking import overlay
from lightning_shard.lab.search import best, meshes

GB = 10**9


@dataclass
class Step:
    """What the stand-in predicts."""

    compute: float
    exchange: float
    parameters_traffic: float
    memory: int
    samples: int
    link: float = 0
    on_host: int = 0
    to_host: int = 0
    from_host: int = 0
    memory_by_cause: dict = field(default_factory=lambda: {"parameters": GB})

    @property
    def seconds(self):
        return self.compute + self.exchange + self.link + self.parameters_traffic


class Machine:
    """Predicts a step of `size` bytes of activations, and notes what it was asked."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __call__(
        self, module, data, mesh, cluster, *, shard_dims, sharding, activation_checkpointing,
        activation_offload, tiles=(),
    ):  # fmt: skip
        checkpointing, offload = activation_checkpointing, activation_offload
        self.asked.append((mesh, sharding, checkpointing, offload))
        ranks = prod(mesh[1:])
        if tiles:
            return Step(
                compute=1, exchange=0, link=3, parameters_traffic=0, samples=1,
                memory=int(GB + self.size / prod(tiles)), on_host=self.size, to_host=2 * self.size,
                from_host=3 * self.size,
            )  # fmt: skip
        if mesh == (1, 2, 2):
            raise UnsupportedOperationError("torch.sort along a split dim")
        kept = (1 / 4 if checkpointing else 1) / (2 if offload else 1)
        return Step(
            compute=(4 / 3 if checkpointing else 2 if offload else 1) / ranks,
            exchange=0.2 * (ranks > 1),
            parameters_traffic=0.1 if sharding == "full" else 0.05,
            memory=int(GB + self.size * kept / ranks),
            samples=mesh[0],
        )


def data(*shape, count=6):
    samples: Any = [torch.zeros(1, *shape)] * count
    return DataLoader(samples, batch_size=None)


def found(size, text="1x4xH100", price=None, shape=(1, 8, 8)):
    machine, cluster = Machine(size), read_cluster(text, price)
    with mock.patch.object(search, "predict", machine):
        return best(LightningModule(), data(*shape), cluster), machine.asked


def test_meshes():
    assert meshes(4, (8, 8)) == [(4, 1), (2, 2), (1, 2, 2), (1, 4)]
    assert meshes(6, (8,)) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert meshes(8, (2, 64)) == [(8, 1), (4, 2), (2, 2, 2), (1, 2, 4)]  # 2 rows: at most 2 ranks
    assert meshes(4, ()) == [(4, 1)]
    assert len(meshes(64, (512, 512, 512))) == 23


@pytest.mark.parametrize(
    ("batch", "dims", "extents"),
    [
        (torch.zeros(1, 2, 16, 8), None, (16, 8)),
        ({"x": torch.zeros(1, 2, 16, 8), "n": 3}, {"x": [3]}, (8,)),
        ((torch.zeros(1, 9, 4), torch.zeros(1)), {0: 1}, (9,)),
        (torch.zeros(1, 9, 4), 1, (9,)),
        (torch.zeros(5, dtype=torch.long), None, ()),
    ],
)
def test_extents(batch, dims, extents):
    assert extents_of(batch, dims) == extents


def test_fastest_first_with_its_limit():
    ranking, _ = found(10 * GB)
    first = ranking.candidates[0]
    assert first.setting.mesh == (4, 1)
    assert first.setting.sharding == "gradients"  # less traffic, and it fits
    assert first.limit == "compute 95%"
    rates = [each.rate for each in ranking.candidates]
    assert rates == sorted(rates, reverse=True)
    assert ranking.slower == [(1, 2, 2)]
    assert "Cannot be faster, even without any exchange: 1x2x2." in str(ranking)


def test_what_does_not_fit_is_checkpointed_and_not_tried_in_vain():
    ranking, asked = found(600 * GB)
    assert {each.setting.mesh for each in ranking.candidates} == {(2, 2), (1, 4)}
    assert ranking.candidates[0].setting.kept == "computed again"
    assert ((2, 2), "full", False, False) not in asked  # half of 600 GB cannot fit
    assert ((1, 4), "full", True, False) in asked
    assert all(each.limit == "memory" for each in ranking.too_large)
    assert ranking.refused == {(1, 2, 2): "torch.sort along a split dim"}


def test_nothing_fits(tmp_path):
    ranking, _ = found(10_000 * GB)
    assert "Nothing fits" in str(ranking)
    assert ranking.save(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="no setting fits"):
        overlay(ranking)


def test_tiles_where_one_device_is_too_small():
    ranking, _ = found(600 * GB, "1xH100", shape=(1, 64, 64))
    only, *modes = [each for each in ranking.candidates if each.setting.in_turns]
    assert [each.setting.sharding for each in (only, *modes)] == ["full", "gradients", "none"]
    # 2 and 4 do not fit, and more move more
    assert {each.setting.mesh for each in (only, *modes)} == {(1, 8)}
    assert only.limit == "link to the host 75%"
    words = str(ranking)
    assert "8 tiles" in words
    assert (
        "8 tiles keep 559 GiB on the host, and move 2.79e+03 GiB in a step: PCIe 4 1.2e+02 s"
        in words
    )
    ranking.candidates = [only]
    strategy = yaml.safe_load(overlay(ranking))["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_shard.TiledStrategy"
    assert TiledStrategy(**strategy["init_args"] | {"sharding": "full"}).tiles == (8,)
    assert not any(each.setting.in_turns for each in found(GB, "1xH100")[0].candidates)


def test_hybrid_needs_nodes():
    _, asked = found(GB, "2x2xH100")
    assert "hybrid" in {mode for _, mode, _, _ in asked}
    _, asked = found(GB)
    assert "hybrid" not in {mode for _, mode, _, _ in asked}


def test_no_time():
    with mock.patch.object(search, "predict", Machine(GB)):
        ranking = best(LightningModule(), data(1, 8, 8), "1x4xH100", seconds=-1)
    assert ranking.not_tried == [(4, 1), (1, 4), (2, 2), (1, 2, 2)]
    assert "No time was left for 4x1" in str(ranking)
    assert "there was no time for the rest" in str(ranking)


def test_all_splits_along_one_dim_come_before_what_saves_memory():
    """So that a search that ends early has seen one that fits."""
    _, asked = found(150 * GB)
    saving = [checkpointing or offload for _, _, checkpointing, offload in asked]
    assert saving.index(True) > [mesh for mesh, *_ in asked].index((1, 4))


def test_cost_and_largest_field():
    ranking, _ = found(10 * GB, price=2.0)
    first = ranking.candidates[0]
    assert ranking.samples == 6
    assert ranking.cost_of_epoch(first) == pytest.approx(2 * 4 * 6 / first.rate / 3600)
    assert ranking.largest
    candidate, extents = ranking.largest
    assert candidate.setting.mesh == (1, 4)
    assert extents == (46, 46)  # 84 GB for what took 2.5 GB: 5.6 times longer edges


def test_what_is_written(tmp_path):
    ranking, _ = found(600 * GB, price=2.0)
    file = ranking.save(tmp_path)
    assert file.name == "plan.yaml"
    trainer = yaml.safe_load(file.read_text())["trainer"]
    options = trainer["strategy"]["init_args"]
    options["sharding"] = ShardingOptions(**options["sharding"])
    strategy = HybridShardStrategy(**options)
    assert strategy.sharding_options.activation_checkpointing is True
    assert options["domain_parallel_size"] == ranking.candidates[0].setting.mesh[1]
    assert (trainer["devices"], trainer["num_nodes"]) == (4, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.txt", "plan.yaml"}
    text = (tmp_path / "plan.txt").read_text()
    assert "Does not fit into 79.2 GiB: 4x1." in text
    assert "computed again" in text


def test_the_first_line_says_whether_rates_were_measured():
    ranking, _ = found(10 * GB)
    first = ranking.cluster.origin
    assert first.startswith("The rates of H100: measured on one card with torch 2.11")
    assert str(ranking).splitlines()[0] == first
    device = replace(ranking.cluster.device, name="snail", source="measured with torch")
    measured = replace(ranking.cluster, device=device)
    first = "The rates of snail and its links: measured with torch."
    assert str(replace(ranking, cluster=measured)).splitlines()[0] == first


def test_mistyped_arguments_do_not_reach_the_trainer():
    with pytest.raises(TypeError, match=r"best\(\) nor the Trainer has an argument 'second'"):
        best(LightningModule(), data(1, 8, 8), "1x4xH100", second=3)
