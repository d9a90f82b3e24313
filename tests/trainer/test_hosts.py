"""Programs that import `pytorch_lightning` train as those of `lightning` do."""

import subprocess
import sys

import pytest

pytest.importorskip("pytorch_lightning", reason="the older package is not installed")


def run(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


ORDERS = {
    "after": "import lightning_shard\nimport pytorch_lightning as pl",
    "before": "import pytorch_lightning as pl\nimport lightning_shard",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_program_of_the_older_package_loads_no_other(order):
    run(f"""{ORDERS[order]}
import sys
strategies = [lightning_shard.HybridShardStrategy(), "hybrid_shard"]
kinds = {{type(pl.Trainer(strategy=s, devices=1, accelerator="cpu").strategy) for s in strategies}}
assert kinds == {{lightning_shard.HybridShardStrategy}}, kinds
assert isinstance(lightning_shard.XPUAccelerator(), pl.accelerators.Accelerator)
assert "xpu" in pl.accelerators.AcceleratorRegistry
assert "lightning.pytorch" not in sys.modules
""")


@pytest.mark.slow
def test_a_mixture_is_refused():
    run("""
import lightning.pytorch, lightning_shard, pytorch_lightning as pl
from lightning_shard.lightning import refuse_mixture

def refused(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert "lightning_shard has taken lightning," in str(error), error
    else:
        raise AssertionError("it was not refused")

refused(lambda: pl.Trainer(strategy=lightning_shard.HybridShardStrategy(), accelerator="cpu"))
refused(lambda: lightning_shard.check(pl.LightningModule(), [], (1, 2)))
refuse_mixture(lightning.pytorch.LightningModule())
""")


MODULE = """
import torch, pytorch_lightning as pl
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        torch.manual_seed(1)
        return DataLoader(torch.randn(4, 1, 8, 8), 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "check", "plan"])
def test_the_command_line_trains_a_module_of_the_older_package(command, tmp_path):
    (tmp_path / "program.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(f"""
model: {{class_path: program.Net}}
data: {{class_path: program.Data}}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  default_root_dir: {tmp_path}
  strategy:
    class_path: lightning_shard.HybridShardStrategy
    init_args: {{domain_parallel_size: 2}}
""")
    subprocess.run(
        [sys.executable, "-m", "lightning_shard", command, "--config", "config.yaml"],
        check=True, cwd=tmp_path,
    )  # fmt: skip
