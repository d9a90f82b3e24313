"""Mistakes end every rank, at once, with one clear sentence."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, UnsupportedOperationError, launch
from lightning_shard.data.split import shard_batch
from tests.parity import mesh_of
from tests.training import loader, make, trainer


@pytest.mark.spmd(4)
@pytest.mark.parametrize("sizes", [("auto", 3), (3, 2), (4, (2, 2))], ids=str)
def test_sizes_that_do_not_fit_the_processes(sizes):
    runner = trainer((1,))
    runner.strategy.processes.data_parallel_size, domain = sizes
    runner.strategy.processes.domain_sizes = (domain,) if isinstance(domain, int) else domain
    with pytest.raises(ValueError, match=r"parallel_size .* 4"):
        runner.fit(make("simple_cnn", torch.float32), loader("simple_cnn", torch.float32, 2, 8))


@pytest.mark.parametrize("sizes", [("auto", 0), (0, 1), ("auto", ())], ids=str)
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError, match="must be 1 or more"):
        HybridShardStrategy(*sizes)


@pytest.mark.spmd(2)
def test_declared_dims_that_a_batch_does_not_have():
    mesh = mesh_of(2)
    batch = {"x": torch.zeros(2, 3, 8, 8), "label": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(
        ValueError, match=r"shard_dims \[4\] of batch entry 'x' must lie in its shape"
    ):
        shard_batch(batch, mesh, {"x": 4})
    with pytest.raises(ValueError, match=r"'y', but the batch has \['x', 'label'\]"):
        shard_batch(batch, mesh, {"y": 2})
    with pytest.raises(
        ValueError, match=r"shard_dims \[5\] of a batch entry must lie in its shape"
    ):
        shard_batch(batch, mesh, 5)


class Siamese(BoringModel):
    """Convolves each time of (B, T, C, H, W)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 3, padding=1)

    def training_step(self, batch, batch_idx):
        found = sum(self.layer(batch["x"][:, t]) for t in range(2))
        return F.mse_loss(found.squeeze(1), batch["y"][:, 0])


class Recurrent(BoringModel):
    """Reads (B, T, C)."""

    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.layer = kind(6, 4, batch_first=True) if kind is nn.GRU else kind(6, 4)

    def training_step(self, batch, batch_idx):
        found = self.layer(batch["x"])
        return (found[0] if isinstance(found, tuple) else found).square().mean()


SEQUENCES = {
    "x of several times": (Siamese, {"x": (2, 2, 9, 7), "y": (1, 9, 7)}, {"x": 3, "y": 2}),
    "a recurrence": (Recurrent, {"x": (5, 6)}, {"x": 0}),
}


@pytest.mark.quick_rows("x of several times")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_refusal_of_default_dims_names_them(name):
    kind, shapes, wanted = SEQUENCES[name]
    rows = [{k: torch.randn(shape) for k, shape in shapes.items()} for _ in range(4)]
    with pytest.raises(UnsupportedOperationError) as caught:
        trainer((2,), limit_val_batches=0).fit(kind(), DataLoader(rows, 2))
    notes = " ".join(caught.value.__notes__)
    assert "shard_dims was not given" in notes
    names = [name for name in shapes if f"{name} (dim" in notes]
    assert names
    assert "name others: shard_dims={" + ", ".join(f"{name!r}: dim" for name in names) in notes
    mended = trainer((2,), limit_val_batches=0, strategy={"shard_dims": wanted})
    mended.fit(kind(), DataLoader(rows, 2))


@pytest.mark.slow_rows("fit")
@pytest.mark.parametrize("step", ["fit", "validate", "test", "predict"])
def test_a_compiled_module(step):
    runner = Trainer(accelerator="cpu", devices=1, strategy=HybridShardStrategy(), logger=False)
    module = torch.compile(BoringModel())
    with pytest.raises(RuntimeError, match="compiled model is incompatible"):
        getattr(runner, step)(module)


def out_of_range():
    """The last class, which only the second rank has, is none."""

    class Segmenter(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 3, 3, padding=1)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.layer(batch["x"]), batch["classes"])

        def train_dataloader(self):
            classes = torch.zeros(8, 5, dtype=torch.int64)
            classes[-1, -1] = 99
            return DataLoader([{"x": torch.randn(1, 8, 5), "classes": classes}] * 2, 2)

    trainer((2,), max_steps=2, limit_val_batches=0).fit(Segmenter())


@pytest.mark.slow
def test_an_index_that_is_wrong_on_one_rank_ends_all():
    began = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="Target 99 is out of bounds"):
        launch(out_of_range)
    assert time.monotonic() - began < 60


class Sorting(nn.Module):
    """Uses an operation that no rule can serve on a split dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svd(x).S.sum()


@pytest.mark.spmd(2)
def test_operation_without_a_rule_is_named():
    module = make("simple_cnn", torch.float32)
    module.training_step = lambda batch: Sorting()(batch[0])
    with pytest.raises(UnsupportedOperationError) as caught:
        trainer((2,)).fit(module, loader("simple_cnn", torch.float32, 2, 8))
    message = str(caught.value)
    for part in ("linalg", "svd", "dim 2 split over 2 ranks", "register_rule", "gather", "shard"):
        assert part in message, message


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  strategy:
    class_path: lightning_shard.HybridShardStrategy
    init_args:
      domain_parallel_size: 2
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        dirpath: checkpoints
        save_on_exception: true
    - class_path: tests.trainer.test_bad_input.FailOnSecondRank
model:
  class_path: lightning_modules.SimpleCNNModule
data:
  class_path: lightning_modules.SyntheticImagesDataModule
  init_args:
    resolution: [16, 16]
    num_train: 64
"""


class FailOnSecondRank(Callback):
    """Raises on one rank only, while the other goes on to its next collective."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == 1:
            raise ArithmeticError("a mistake on rank one")


def run_cli(tmp_path: Path, config: str, *words: str) -> tuple[int, str, float]:
    (tmp_path / "config.yaml").write_text(config)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lightning_shard", "fit", "--config", "config.yaml", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


@pytest.mark.slow  # each rank of a command line imports all
def test_exception_on_one_rank_ends_all(tmp_path):
    code, output, seconds = run_cli(tmp_path, CONFIG)
    assert code != 0
    assert "ArithmeticError: a mistake on rank one" in output
    assert "Traceback" in output
    assert seconds < 60 + 60, "two starts of the interpreter on a loaded machine, and no time-out"


FABRIC = """
import time, torch
from lightning import Fabric
from lightning_shard import FabricShardStrategy

def main(fabric):
    net = torch.nn.Conv2d(1, 4, 3, padding=1)
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for i in range(3):
        if i == 1 and fabric.global_rank == 1:
            raise ValueError("the second batch is bad")
        fabric.backward(net(fabric.to_device(torch.ones(2, 1, 8, 8))).square().mean())
        opt.step()

def slowly(fabric):
    try:
        main(fabric)
    except RuntimeError:
        time.sleep(6)
        raise

strategy = FabricShardStrategy(domain_parallel_size=2)
Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(slowly)
"""
TRAINER = """
import time, torch
from lightning import Callback, LightningModule, Trainer
from lightning_shard import HybridShardStrategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("the second batch is bad")
        return self.conv(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Slow(Callback):
    def on_exception(self, trainer, module, exception):
        if trainer.global_rank == 0:
            time.sleep(6)

strategy = HybridShardStrategy(domain_parallel_size=2)
loader = torch.utils.data.DataLoader(torch.ones(6, 1, 8, 8), batch_size=2)
Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[Slow()], max_epochs=1).fit(
    Net(), loader
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [FABRIC, TRAINER], ids=["Fabric", "Trainer"])
def test_the_process_that_started_the_others_may_be_slow_to_end(tmp_path, program):
    """Lightning would kill it within 5 s of the first failure, before it has named it."""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    first = "another rank failed first: rank 1: ValueError: the second batch is bad"
    assert f"[rank 0] ended, because {first}" in done.stderr
    assert done.returncode == 1


@pytest.mark.slow  # as an exception of one rank does
def test_missing_data_file_ends_all(tmp_path):
    config = CONFIG[: CONFIG.index("data:")].replace("SimpleCNNModule", "TFNODarcy") + (
        "data:\n  class_path: lightning_modules.DarcyDataModule\n"
        "  init_args:\n    source: nowhere\n"
    )
    code, output, _ = run_cli(tmp_path, config)
    assert code != 0
    assert output.count("error: ") == 1, output
    assert "nowhere" in output


@pytest.mark.slow
def test_different_configs_end_all(tmp_path):
    config = CONFIG.replace("    - class_path: tests.trainer.test_bad_input.FailOnSecondRank\n", "")
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "second.yaml").write_text(config.replace("num_train: 64", "num_train: 32"))
    port = 20000 + os.getpid() % 10000
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_shard", "fit", "--config", file],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {
                "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank, file in enumerate(["config.yaml", "second.yaml"])
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    sentence = "data.init_args.num_train is 64 on rank 0 and 32 on rank 1"
    assert [output.count(sentence) for output in outputs] == [1, 0], outputs
