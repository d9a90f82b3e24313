"""Programs that import `pytorch_lightning` train as those of `lightning` do, in any order."""

import logging
import subprocess
import sys

import grimp
import lightning.pytorch
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero as rank_zero_module
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAUROC

import lightning_shard
from lightning_shard import hosts
from lightning_shard.checkpoint.state import full_module_state
from tests.training import shared_path

older = pytest.importorskip("pytorch_lightning", reason="the older package is not installed")
environments = pytest.importorskip("lightning_fabric.plugins.environments")


def module_of(package):
    class Net(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)).double()
            self.metric = BinaryAUROC()

        def training_step(self, batch, batch_idx):
            out = self.net(batch)
            self.metric(out.sigmoid().flatten(), (batch.flatten() > 0).long())
            self.log("auroc", self.metric, on_step=False, on_epoch=True)
            loss = out.square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def predict_step(self, batch, batch_idx):
            return lightning_shard.gather(self.net(batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    return Net()


def loader(size):
    batches = torch.randn(8, 1, 9, 7, generator=torch.Generator().manual_seed(1)).double()
    return DataLoader(batches, size)


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
         "enable_model_summary": False, "gradient_clip_val": 0.5}  # fmt: skip


def trained(package, strategy, folder, devices, size, **options):
    net = module_of(package)
    saves = package.callbacks.ModelCheckpoint(folder, monitor="loss", save_last=True)
    stops = package.callbacks.EarlyStopping("loss", patience=3)
    trainer = package.Trainer(
        devices=devices, strategy=strategy, callbacks=[saves, stops, lightning_shard.EpochReport()],
        max_epochs=2, **QUIET, **options,
    )  # fmt: skip
    trainer.fit(net, loader(size))
    return trainer, net


@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [1, 2])
def test_the_older_package_trains_alike(domain):
    alone, expected = trained(
        lightning.pytorch, "auto", shared_path("alone") / str(dist.get_rank()), 1, 4,
        plugins=
        [lightning.pytorch.plugins.environments.LightningEnvironment()],
    )  # fmt: skip
    by_name = {"strategy": "hybrid_shard"} if domain == 1 else {}
    strategy = by_name.get("strategy") or lightning_shard.HybridShardStrategy(
        domain_parallel_size=domain
    )
    folder = shared_path("split")
    elastic = [environments.TorchElasticEnvironment()]
    trainer, net = trained(older, strategy, folder, 2, 4 * domain // 2, plugins=elastic)
    assert hosts.package_of(trainer.strategy) == "pytorch_lightning"
    assert all(hosts.package_of(c) == "pytorch_lightning" for c in trainer.callbacks[:3])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(full_module_state(net)[name], value, rtol=1e-9, atol=1e-12)
    losses = (float(t.callback_metrics["loss"]) for t in (trainer, alone))
    assert next(losses) == pytest.approx(next(losses), rel=1e-6)
    again = older.Trainer(
        devices=2, strategy="hybrid_shard", max_epochs=3, enable_checkpointing=False,
        plugins=elastic, **QUIET,
    )  # fmt: skip
    net = module_of(older)  # the mesh is another one
    again.fit(net, loader(2), ckpt_path=trainer.checkpoint_callback.last_model_path)
    assert again.global_step == 6
    kept = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    module_of(lightning.pytorch).load_state_dict(kept)
    found = again.predict(net, loader(2))
    assert len(found) == 2


def test_a_strategy_of_either_package_becomes_one_of_the_other():
    from lightning_shard.for_pytorch_lightning.trainer.strategy import (  # pyright: ignore
        HybridShardStrategy,
    )

    kinds = (lightning_shard.HybridShardStrategy, HybridShardStrategy)
    for kind, package in zip(kinds, (older, lightning.pytorch), strict=True):
        strategy = kind(1, exact_random=True, timeout_s=99)
        package.Trainer(devices=1, strategy=strategy, **QUIET)
        assert hosts.package_of(strategy) == package.__name__.split(".")[0]
        assert (strategy.processes.timeout_s, strategy.exact_random) == (99, True)


def test_tiles_train_for_the_older_package(tmp_path):
    found = []
    for package in (lightning.pytorch, older):
        strategy = lightning_shard.TiledStrategy(2, exact_random=True)
        trainer, net = trained(package, strategy, tmp_path / package.__name__, 1, 4)
        assert (strategy.tiles, strategy.exact_random) == ((2,), True)
        found.append((net.state_dict(), trainer.callback_metrics["loss"]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_accelerators_are_of_both():
    for package in (older, lightning.pytorch):
        assert isinstance(lightning_shard.XPUAccelerator(), package.accelerators.Accelerator)
        assert "xpu" in package.accelerators.AcceleratorRegistry


@pytest.mark.parametrize(
    ("given", "asked"), [(older, lightning.pytorch), (lightning.pytorch, older)]
)
def test_a_mixture_is_explained(given, asked):
    trainer = asked.Trainer(**QUIET | {"enable_checkpointing": False})
    words = f"LightningModule of the package {given.__name__.split('.')[0]}, but the Trainer"
    with pytest.raises(TypeError, match=words):
        trainer.fit(module_of(given), loader(4))


def test_a_class_that_extends_ours_is_told_what_to_extend():
    class Own(lightning_shard.HybridShardStrategy):
        pass

    with pytest.raises(TypeError, match="import HybridShardStrategy"):
        older.Trainer(strategy=Own(), devices=1, **QUIET)
    from lightning_shard.for_pytorch_lightning.trainer.strategy import (  # pyright: ignore
        HybridShardStrategy,
    )

    class Older(HybridShardStrategy):
        pass

    trainer = older.Trainer(strategy=Older(), devices=1, **QUIET)
    assert type(trainer.strategy) is Older


@pytest.mark.parametrize("package", [older, lightning.pytorch])
def test_check_takes_a_module_of_either_package_and_is_quiet(package, caplog):
    caplog.set_level("INFO", rank_zero_module.log.name)
    found = lightning_shard.check(module_of(package), loader(4), (1, 2), simulated=True)
    assert found.is_supported, found
    assert not caplog.records
    assert rank_zero_module.log.isEnabledFor(logging.INFO)  # and Trainers print again


def test_shared_files_do_without_lightning():
    graph = grimp.build_graph("lightning_shard", include_external_packages=True)
    for name in hosts.SHARED:
        inside = {name, *graph.find_descendants(name)}
        assert not any("lightning" in graph.find_upstream_modules(each) for each in inside)


ORDERS = {
    "after": "import lightning_shard\nimport pytorch_lightning as pl",
    "before": "import pytorch_lightning as pl\nimport lightning_shard",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_program_of_the_older_package_loads_no_other(order):
    program = f"""{ORDERS[order]}
import sys
strategies = [lightning_shard.HybridShardStrategy(), "hybrid_shard"]
kinds = {{type(pl.Trainer(strategy=s, devices=1, accelerator="cpu").strategy) for s in strategies}}
assert len(kinds) == 1, kinds
assert "lightning.pytorch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.slow
def test_without_the_older_package_nothing_of_it_is_looked_for():
    program = """
import sys
class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import lightning_shard
import lightning.pytorch as pl
strategy = lightning_shard.HybridShardStrategy()
assert pl.Trainer(strategy=strategy, devices=1, accelerator="cpu").strategy is strategy
assert not [name for name in sys.modules if "pytorch_lightning" in name]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "check", "plan"])
def test_the_command_line_trains_a_module_of_the_older_package(command, tmp_path):
    (tmp_path / "program.py").write_text("""
import torch, pytorch_lightning as pl
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(4, 1, 8, 8), 2)
""")
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
