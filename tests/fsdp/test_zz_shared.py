import faulthandler
import pytest, torch
from torch import nn
from lightning.pytorch import LightningModule
from tests.trainer.featured import fit_alone, fit_sharded, assert_same_state
from tests.trainer.programs import Program


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.model(x))


class Shared(Program):
    def start(self):
        shared = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.a, self.b = Wrapper(shared), Wrapper(shared)

    def loss(self, batch):
        return (self.a(batch["x"]) - self.b(batch["x"])).square().mean()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("wrap", [["Wrapper"], ["Wrapper", "Conv2d"], ["Sequential"]])
def test_one_module_inside_of_two_blocks(wrap):
    faulthandler.dump_traceback_later(25)
    alone, module = Shared(), Shared()
    fit_alone(alone, limit_train_batches=3)
    fit_sharded(module, (2,), strategy={"wrap": wrap}, limit_train_batches=3)
    assert_same_state(module, alone)
    faulthandler.cancel_dump_traceback_later()
