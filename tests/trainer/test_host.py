"""The private names of Lightning: what a new release has removed is listed here, and used there."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, SequentialSampler

import lightning_shard
from lightning_shard.lightning import PRIVATE, places
from lightning_shard.trainer import host, script_launchers

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


def test_this_release_of_lightning_has_all_attributes():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    module, fit = BoringModel(), trainer.fit_loop
    validation = fit.epoch_loop.val_loop
    validation._combined_loader = CombinedLoader([], "sequential")
    numbered = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler([1]), 1, drop_last=False))
    holders = {
        trainer: ["_accelerator_connector"],
        module: ["_current_fx_name", "_device", "_device_mesh"],
        trainer.fit_loop.epoch_loop: ["_broadcast_sigterm_tensor", "_should_check_val_fx"],
        fit: ["_combined_loader_states_to_load", "_data_fetcher", "_data_source"],
        validation: ["_evaluation_step", "_has_run", "_is_sequential", "_results"],
        _Hashed(validation._results): ["_get_cache"],
        ModelCheckpoint(): ["_monitor_candidates", "_save_last_checkpoint"],
        EarlyStopping("loss"): ["_evaluate_stopping_criteria"],
        numbered: ["_batch_sampler"],
    }
    assert sorted(name for names in holders.values() for name in names) == sorted(host.ATTRIBUTES)
    for holder, names in holders.items():
        assert not [name for name in names if not hasattr(getattr(holder, "held", holder), name)]


class _Hashed:
    """A dict that can be a key."""

    def __init__(self, held):
        self.held = held


def test_only_that_page_reads_attributes_of_lightning():
    """An attribute of `self` may have the same name."""
    assert len(host.ATTRIBUTES) <= 18
    for file in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        read = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self"
        }
        read |= {
            node.value
            for node in nodes
            if isinstance(node, ast.Constant)
            and file.stem != "host"
            and isinstance(node.value, str)
        }
        if file.name == "host.py":
            known = {
                *host.ATTRIBUTES,
                "_actions",
                "_computed",
                "_update_count",
            }  # argparse, torchmetrics
            assert {name for name in read if name[:1] == "_" != name[1:2]} <= known
        elif file.parent.name in ("trainer", "callbacks", "xpu", "lab", "cli"):
            assert not read & host.ATTRIBUTES.keys(), file


def test_what_is_set_is_read():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    module = BoringModel()
    host.tell_device(module, torch.device("meta"))
    assert module.device == torch.device("meta")
    assert host.hook_of(module) == ""
    assert host.trainer_of(module) is None
    module.trainer = trainer
    assert host.trainer_of(module) is trainer
    plain = torch.optim.SGD(module.parameters())
    assert host.plain_optimizer(LightningOptimizer(plain)) is plain
    assert host.plain_optimizer(plain) is plain


def test_the_observer_of_lightning_has_nobody_to_kill(monkeypatch):
    """It would kill the script at once where another process fails; ours gives it time."""
    begun, seen, shared = [], [], []
    monkeypatch.setattr(script_launchers, "share_cores", shared.append)
    monkeypatch.setattr(script_launchers, "watch_others", lambda processes: seen.extend(processes))
    monkeypatch.setattr(script_launchers, "begin_to_start", lambda: None)
    monkeypatch.setattr(sys, "argv", [__file__])
    failing = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    failing.wait()  # it may have ended before anybody looks
    launcher = SimpleNamespace(
        cluster_environment=SimpleNamespace(creates_processes_externally=False), procs=[failing],
        num_processes=2,
    )  # fmt: skip

    def launch(function):
        watched = launcher.procs
        result = function()
        begun.append(watched)
        return result

    assert script_launchers._in_patience(launcher, launch, lambda: 5) == 5
    assert begun == [[]]
    assert shared == [2]
    assert launcher.procs == [failing]
    assert seen == [failing]
