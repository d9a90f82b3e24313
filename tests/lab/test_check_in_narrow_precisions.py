"""`check` in bf16: rounding is no difference, and a small fault is not hidden by it."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_shard


class Net(LightningModule):
    """A convolution, GELU, and a convolution whose ranks may be wrong."""

    def __init__(self, fault):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.fault = fault

    def forward(self, x):
        y = F.gelu(self.first(x))
        if not isinstance(x, lightning_shard.DomainTensor) or self.fault == "none":
            return self.second(y)
        if self.fault == "halo":
            return lightning_shard.local_map(self.second)(y)
        return F.conv2d(y, self.second.weight, self.second.bias * 1.01, padding=1)

    def training_step(self, batch, batch_idx):
        return (self(batch) - batch.roll(1, 2)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


@pytest.mark.parametrize("fault", ["none", "halo", "bias"])
@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.slow)]
)
def test_what_bf16_leaves_in_doubt_is_decided_in_float64(precision, fault):
    draw = torch.Generator().manual_seed(4)
    fields = DataLoader(torch.randn(4, 1, 32, 32, generator=draw), batch_size=4)
    found = lightning_shard.check(Net(fault), fields, simulated=True, precision=precision)
    assert found.is_exact == (fault == "none"), str(found)
    if fault != "halo":  # which is beyond rounding at once
        assert 1e-4 < found.training.rounding < 5e-2
        assert "These numbers are from float64" in str(found)
