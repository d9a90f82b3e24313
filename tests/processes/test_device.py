"""A row of `DEVICES` is what the package knows of a device, and no other file names one."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import lightning_shard
from lightning_shard.cli.doctor import _devices
from lightning_shard.ops.spectral.cost import Extent, plan
from lightning_shard.processes import device as devices
from lightning_shard.processes.device import DEVICES, Device, Rates, device_of
from lightning_shard.processes.failures.failure import is_lost_connection
from lightning_shard.processes.forking import initialised_accelerator
from lightning_shard.processes.start import start_process_group
from lightning_shard.trainer.asked_devices import device_kind, meant

ROOT = Path(lightning_shard.__file__).parent
NAMES = re.compile(r"\b(cuda|xpu|hpu|mps|npu|mtia|nccl|xccl|hccl|ccl)\b")
# files that may name a device in their code, and why
NAMED = {
    "processes/device.py": "the table",
    "trainer/xpu/": "Lightning's side of one device",
    "__init__.py": "names that side",
    "tensor/facts.py": "torch's own list of attributes",
    "trainer/asked_devices.py": "Lightning's `gpu` is Apple's, where there is one",
    "processes/torch_private/internals.py": "says what breaks",
}


def _names(tree: ast.AST) -> set[str]:
    """The names of devices in strings and attributes, docstrings left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = set()
    for node in ast.walk(tree):
        text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(text, str) and id(node) not in docstrings:
            found.update(NAMES.findall(text))
    return found


def test_only_the_table_names_devices():
    naming = {
        str(path.relative_to(ROOT)): found
        for path in ROOT.rglob("*.py")
        if (found := _names(ast.parse(path.read_text())))
    }
    assert naming["processes/device.py"] >= {"cuda", "xpu", "ccl"}
    strange = {name: found for name, found in naming.items() if not name.startswith(tuple(NAMED))}
    assert strange == {}
    assert naming["trainer/asked_devices.py"] == {"mps"}


@pytest.fixture
def another_device(monkeypatch):
    """A device of which nothing but its row and its module of torch is known; it is in use."""
    driver = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 3, is_initialized=lambda: True,
        get_device_name=lambda _: "Abacus 3",
    )  # fmt: skip
    monkeypatch.setattr(torch, "abacus", driver, raising=False)
    rates = Rates(flop=1.0, touch=1.0, fft=1e-6, send=1e-6, start=1e-6)
    row = Device("abacus", rates, shown_by="ABACUS_MASK")
    rows = tuple(row for row in DEVICES if not row.found_by_lightning)
    found_by_lightning = next(row for row in DEVICES if row.found_by_lightning)
    absent = mock.Mock(wraps=torch.cuda, **{"is_available.side_effect": lambda: False})
    monkeypatch.setattr(torch, found_by_lightning.type, absent)
    monkeypatch.setattr(devices, "DEVICES", (found_by_lightning, row, *rows))
    return row


def test_a_new_row_is_known_everywhere(another_device):
    assert devices.present() == "abacus"
    assert initialised_accelerator() == "ABACUS"
    assert any(line.split() == "abacus 3 x Abacus 3".split() for line in _devices())
    assert device_kind("abacus") == "abacus"
    for word in ("auto", "gpu", "cpu"):
        assert meant(word) == ("cpu" if word == "cpu" else "abacus")
    # what the CPU multiplies, a device of quick FFTs transforms
    extents = (Extent(1024, 1024, 32, 4), Extent(1024, 1024, 17, 1))
    assert {fft for _, fft in plan(extents, 32, 4, True, "cpu")} == {False}
    assert {fft for _, fft in plan(extents, 32, 4, True, "abacus")} == {True}


def test_too_few_of_a_new_device(another_device, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda name: getattr(torch, name))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RuntimeError, match="3 devices of type 'abacus' for its 4 processes"):
        start_process_group()


def test_a_device_without_a_row_is_promised_least():
    row = device_of("of_another_package")
    assert not row.averages
    assert row.rates == device_of("cuda").rates


@pytest.mark.parametrize("words", [w for row in DEVICES for w in row.lost])
def test_lost_connections_of_each_device(words):
    assert is_lost_connection(RuntimeError(f"[of a collective] {words}: broken"))
