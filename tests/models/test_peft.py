"""LoRA adapters of peft on a split network train as in one process, and they alone are saved."""

from importlib.util import find_spec

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard.checkpoint.state import full_module_state
from tests import training
from tests.trainer.featured import QUIET, assert_same_state
from tests.training import Fields, darcy_sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
]


class Attention(nn.Module):
    """Convolutions to patches and back, and attention over the patches between them."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        patches = self.patches(x)
        tokens = patches.flatten(2).transpose(1, 2)
        tokens = nn.functional.scaled_dot_product_attention(
            self.query(tokens), self.key(tokens), self.value(tokens)
        )
        fields = tokens.transpose(1, 2).reshape(patches.shape) + patches
        return self.last(nn.functional.interpolate(fields, size=x.shape[-2:], mode="bilinear"))


class Adapted(LightningModule):
    strict_loading = False  # a checkpoint has the adapters alone

    def __init__(self):
        import peft  # which imports many packages

        super().__init__()
        torch.manual_seed(6)
        adapters = peft.LoraConfig(r=2, target_modules=["query", "value", "patches", "last"])
        self.network = peft.get_peft_model(Attention(), adapters).double()

    def training_step(self, batch, batch_idx):
        return (self.network(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: x for name, x in state.items() if ".lora_" in name}


@pytest.mark.parametrize(
    "domain",
    [
        pytest.param((2,), marks=pytest.mark.spmd(2), id="2"),
        pytest.param((2, 2), marks=pytest.mark.spmd(4), id="2x2"),
    ],
)
def test_adapters_train_and_resume_as_in_one_process(domain):
    data = DataLoader(Fields(darcy_sample, 8), 2)
    alone, first, second = Adapted(), Adapted(), Adapted()
    frozen = {name: p.clone() for name, p in alone.named_parameters() if ".lora_" not in name}
    options = QUIET | {"max_epochs": 2}
    Trainer(devices=1, plugins=LightningEnvironment(), **options).fit(alone, data)
    runner = training.trainer(domain, use_distributed_sampler=False)
    runner.fit(first, data)
    path = training.shared_path("adapters.ckpt")
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert set(saved) == {name for name in alone.state_dict() if ".lora_" in name}
    runner = training.trainer(domain, use_distributed_sampler=False, max_epochs=2)
    runner.fit(second, data, ckpt_path=path)
    assert_same_state(second, alone)
    state = full_module_state(second)
    assert all(state[name].equal(value) for name, value in frozen.items())
    assert any(not state[name].equal(value) for name, value in saved.items())
