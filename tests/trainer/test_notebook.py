"""A notebook's cells start processes: by `launch`, and by a Trainer with several devices."""

import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

IMPORTS = """
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridShardStrategy

torch.randn(500, 500) @ torch.randn(500, 500)  # with the threads of this machine
"""
LAUNCH = """
def body(scale):
    total = torch.ones(()) * scale
    dist.all_reduce(total)
    print("in", dist.get_rank())
    return float(total)

print(lightning_shard.launch(body, 3, processes=2))
"""
MODULE = """
class Module(LightningModule):
    def configure_model(self):
        if not hasattr(self, "network"):
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3))

    def training_step(self, batch, index):
        loss = self.network(batch).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(devices, **options):
    return Trainer(
        accelerator="cpu", devices=devices, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )

data = DataLoader(torch.randn(8, 1, 7, 6, generator=torch.Generator().manual_seed(1)), 2)
"""
FIT = """
split, alone = Module(), Module()
two = trainer(2, strategy=HybridShardStrategy(domain_parallel_size=2))
two.fit(split, data)
one = trainer(1, strategy=HybridShardStrategy())
one.fit(alone, data)
torch.testing.assert_close(split.state_dict(), alone.state_dict())
torch.testing.assert_close(two.callback_metrics, one.callback_metrics)
torch.testing.assert_close(two.validate(split, data), one.validate(alone, data))
print(lightning_shard.launch(dist.get_world_size))
"""
# also the other way round: this session has a process group of its own by now
FAIL = """
def fail():
    if dist.get_rank() == 1:
        raise ArithmeticError("a mistake on rank one")
    dist.barrier()

lightning_shard.launch(fail)
"""
FAIL_IN_TRAINER = """
def training_step(module, batch, index):
    if module.global_rank == 1:
        raise ArithmeticError("a mistake in a step on rank one")
    return Module.training_step(module, batch, index)

failing = type("Failing", (Module,), {"training_step": training_step})()
trainer(2, strategy=HybridShardStrategy(domain_parallel_size=2)).fit(failing, data)
"""
REFUSED = """
torch.cuda.is_initialized = lambda: True
trainer(2, strategy=HybridShardStrategy()).fit(Module(), data)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which ipykernel shows less
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=200, resources={})
    client.resources = {"metadata": {"path": str(tmp_path)}}
    with client.setup_kernel():
        yield client


def output_of(client: NotebookClient, source: str) -> list[str]:
    """What a cell prints, as lines without order."""
    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1)
    text = "".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout")
    return sorted(text.splitlines())


@pytest.mark.slow
def test_cells(kernel):
    output_of(kernel, IMPORTS)
    assert output_of(kernel, LAUNCH) == ["[6.0, 6.0]", "[rank 1] in 1", "in 0"]
    output_of(kernel, MODULE)
    assert "[2, 2]" in output_of(kernel, FIT)
    with pytest.raises(CellExecutionError, match="ArithmeticError: a mistake on rank one"):
        output_of(kernel, FAIL)
    start = time.monotonic()
    with pytest.raises(CellExecutionError, match="a mistake in a step on rank one"):
        output_of(kernel, FAIL_IN_TRAINER)
    assert time.monotonic() - start < 25
    with pytest.raises(CellExecutionError, match=r"impossible because CUDA .* restart the kernel"):
        output_of(kernel, REFUSED)
