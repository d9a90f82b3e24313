"""No rank needs more memory for a step than one process, and where fields are large, its share."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torchvision
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard.fsdp.blocks import blocks
from lightning_shard.processes.mesh import make_mesh
from tests import training
from tests.pairs import choose


class Steps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, 0.9)


class Fields(Steps):
    """Activations are nearly all that a step holds."""

    def build(self) -> None:
        layers = [nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.GELU()) for c in (1, 8, 8, 8)]
        self.network = nn.Sequential(*layers, nn.Conv2d(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class Perceptron(Steps):
    """Two large layers of one class, which are attributes, on a flattened field."""

    def build(self) -> None:
        self.first, self.second = nn.Linear(64 * 64, 1000), nn.Linear(1000, 64 * 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.flatten(1)))).view_as(x)


class Views(Steps):
    """Parameters beside small fields; each block runs for two views, as in Barlow Twins."""

    def build(self) -> None:
        self.blocks = nn.Sequential(*[Residual() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) - self.blocks(x.flip(-1)).flip(-1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Conv2d(128, 128, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.f(x))


class Tied(Perceptron):
    """Reads the weight of a layer outside of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        return nn.functional.linear(hidden, self.first.weight.mT).view_as(x)


PROGRAMS = {
    "fields": (Fields, (1, 256, 256), 0.6),
    "perceptron": (Perceptron, (1, 64, 64), 1.0),
    "views": (Views, (128, 4, 4), 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), choose(PROGRAMS, ["1x2", "2x1"]))
def test_a_rank_needs_less_than_one_process(name: str, mesh: str) -> None:
    make, shape, most = PROGRAMS[name]
    # of a data replica, half of the batch of one process
    samples = 4 // int(mesh[0])
    data = DataLoader(torch.randn(samples, *shape), samples)
    found = lightning_shard.plan(make(), data, mesh, sharding="full")
    alone = lightning_shard.plan(make(), DataLoader(torch.randn(4, *shape), 4), "1x1")
    assert found.memory <= most * alone.memory, f"{found}\n{alone}"


def bytes_of_tensors() -> int:
    """The bytes of all tensors of this process, each storage once."""
    gc.collect()
    found = [
        x
        for x in gc.get_objects()
        if issubclass(type(x), Tensor) and type(x).__name__ in ("Tensor", "Parameter")
    ]
    storages = [x.untyped_storage() for x in found if not x.is_meta]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


class Count(Callback):
    """Counts the tensors of a rank between two steps."""

    def __init__(self, module: LightningModule) -> None:
        self.old = [weakref.ref(p) for p in module.parameters()]

    def on_train_batch_start(self, *_: Any) -> None:
        self.bytes = bytes_of_tensors()


@pytest.mark.quick_rows("views-1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("name", "domain"), choose(["perceptron", "views"], [2, 1]))
def test_whole_parameters_are_given_back(name: str, domain: int) -> None:
    """Before the second step a rank holds its parts of parameters, gradients and momentum."""
    make, shape, _ = PROGRAMS[name]
    before = bytes_of_tensors()
    module = make()
    whole = sum(p.nbytes for p in module.parameters())
    count = Count(module)
    data = DataLoader(torch.randn(8, *shape), 2)
    options: dict[str, Any] = {"strategy": {"sharding": "full"}, "max_steps": 2}
    runner = training.trainer((domain,), callbacks=[count], **options)
    runner.fit(module, data)
    assert all(old() is None for old in count.old)
    assert count.bytes - before < 1.6 * whole  # each is half of the whole


@pytest.mark.spmd(4)
def test_whole_parameters_are_given_back_by_a_script() -> None:
    module = Views()
    old = [weakref.ref(p.untyped_storage()) for p in module.parameters()]
    lightning_shard.parallelize(module, make_mesh("cpu", 2, (2,)))
    gc.collect()
    assert all(storage() is None for storage in old)


def test_large_layers_are_blocks_unless_their_weight_is_read() -> None:
    network = Perceptron()
    assert blocks(network) == [network.first, network.second]
    read = Tied()
    assert blocks(read) == [read.second]


def test_large_layers_of_a_sequence_are_blocks() -> None:
    with torch.device("meta"):
        network = torchvision.models.alexnet()
    assert blocks(network) == [
        network.features,
        network.classifier[1],
        network.classifier[4],
        network.classifier[6],
    ]
