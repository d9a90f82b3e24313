"""The private names of Lightning: what a new release has removed is listed here, and used there."""

import ast
import importlib
import signal
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_shard
from lightning_shard.trainer import host

PACKAGE = Path(lightning_shard.__file__).parent


def private_imports(file: Path) -> list[tuple[str, str]]:
    """The private names that a file imports from Lightning, with their modules."""
    nodes = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
    return [
        (node.module or "", alias.name)
        for node in nodes
        if (node.module or "").split(".")[0] == "lightning"
        for alias in node.names
        if alias.name.startswith("_")
    ]


def test_this_release_of_lightning_has_all_names():
    gone = []
    for module, name in private_imports(PACKAGE / "trainer" / "host.py"):
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            gone.append(f"{module}.{name}")
    assert not gone, "this release of Lightning lacks: " + ", ".join(gone)


@pytest.mark.slow
def test_no_other_file_imports_them():
    others = {
        str(file.relative_to(PACKAGE)): names
        for file in PACKAGE.rglob("*.py")
        if file.name != "host.py" and (names := private_imports(file))
    }
    assert not others


def test_attributes_of_lightnings_objects():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert host.chosen_devices(trainer) == [torch.device("cpu")]
    assert callable(trainer._signal_connector._slurm_sigusr_handler_fn)
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    host.take_sigterm(trainer, print)
    assert trainer._signal_connector._sigterm_notifier_fn is print
    environment = LightningEnvironment()
    host.meet_at(environment, 29511)
    assert environment.main_port == 29511
    assert hasattr(ThroughputMonitor(lambda _: 1), "_throughputs")
    module = BoringModel()
    assert hasattr(module, "_device")
    assert hasattr(module, "_device_mesh")
    assert module._compiler_ctx is None
    host.tell_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    plain = torch.optim.SGD(module.parameters())
    assert host.plain_optimizer(LightningOptimizer(plain)) is plain
    assert host.plain_optimizer(plain) is plain


def test_a_job_is_queued_again_by_lightnings_handler(monkeypatch):
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    heard = []
    connector = trainer._signal_connector
    monkeypatch.setattr(connector, "_slurm_sigusr_handler_fn", lambda *a: heard.append(a))
    host.begin_requeue(trainer, signal.SIGUSR1)
    assert heard == [(signal.SIGUSR1, None)]
