"""A step of MeanFlow under the strategy: a jvp of blocks, then backward; shards refuse it."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.func import jvp
from torch.utils.data import DataLoader

from lightning_shard import UnsupportedOperationError
from lightning_shard.checkpoint.state import full_module_state
from tests.parity import assert_same
from tests.tensor.test_transforms import Net, mean_flow
from tests.training import Losses, trainer


class MeanFlow(LightningModule):
    """Its loss is that of MeanFlow, or of the tangent alone."""

    def __init__(self, tangent=False):
        super().__init__()
        self.tangent = tangent
        torch.manual_seed(0)
        self.net = Net().double()
        self.net.last = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), self.net.last)
        self.net.last[2] = nn.Conv2d(8, 2, 3, padding=1)
        self.double()

    def training_step(self, batch, _):
        if self.tangent:
            r, t = batch["r"], batch["t"]
            slope = jvp(lambda x: self.net(x, r, t), (batch["x"],), (batch["noise"],))[1]
            return slope.square().mean()
        return mean_flow(self.net, batch["x"], batch["noise"], batch["r"], batch["t"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples():
    torch.manual_seed(1)
    return [
        {
            "x": torch.randn(2, 7, 6, dtype=torch.float64),
            "noise": torch.randn(2, 7, 6, dtype=torch.float64),
            "r": torch.rand((), dtype=torch.float64) / 2,
            "t": torch.rand((), dtype=torch.float64),
        }
        for _ in range(6)
    ]


def check_step(domain, replicas, tangent=False):
    alone = MeanFlow(tangent)
    optimizer, wanted = alone.configure_optimizers(), []
    for i, batch in enumerate(DataLoader(samples(), 2)):
        loss = alone.training_step(batch, i)
        loss.backward()
        wanted.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    module, losses = MeanFlow(tangent), Losses()
    trainer(domain, callbacks=[losses]).fit(module, DataLoader(samples(), 2 // replicas))
    mean = torch.tensor(losses.values, dtype=torch.float64)
    torch.distributed.all_reduce(mean)
    assert_same(
        mean / torch.distributed.get_world_size(), torch.tensor(wanted, dtype=torch.float64)
    )
    for name, value in full_module_state(module).items():
        assert_same(value, alone.state_dict()[name], name)


@pytest.mark.slow
def test_a_step_equals_one_process(run_each):
    run_each(
        2,
        check_step,
        {
            "1x2": {"domain": (2,), "replicas": 1},
            "2x1": {"domain": (1,), "replicas": 2},
            "the tangent alone": {"domain": (2,), "replicas": 1, "tangent": True},
        },
    )
    run_each(4, check_step, {"2x2": {"domain": (2,), "replicas": 2}})


@pytest.mark.spmd(2)
def test_sharded_blocks_refuse_it():
    fit = trainer((2,), strategy={"sharding": "full", "min_num_params": 1}).fit
    with pytest.raises(UnsupportedOperationError, match=r"forward mode.*sharding='none'"):
        fit(MeanFlow(), DataLoader(samples(), 2))
