"""The private names of Lightning: what a new release has removed is listed here, and used there."""

import ast
import importlib
import signal
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_shard
from lightning_shard.lightning import PRIVATE, places
from lightning_shard.trainer import host

PACKAGE = Path(lightning_shard.__file__).parent


def test_this_release_of_lightning_has_all_names():
    gone = []
    for module, name, use in PRIVATE.values():
        if not hasattr(importlib.import_module(f"lightning.{module}"), name):
            gone.append(f"{module}.{name}: {use}")
    assert not gone, "this release of Lightning lacks: " + ", ".join(gone)


def test_types_are_of_the_same_names():
    """What the page finds as a program runs is what a checker reads in its stub."""
    stub = ast.parse((PACKAGE / "lightning.pyi").read_text())
    typed = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    found = {name: f"lightning.{module}.{there}" for name, (module, there) in places().items()}
    found.pop("VERSION")
    assert typed == found


def test_only_that_page_knows_lightning():
    for file in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        modules = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
        assert not [m for m in modules if m and m.split(".")[0] == "lightning"], file


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
