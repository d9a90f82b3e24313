"""The processes that a script starts run its program, with its flags of Python."""

import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from lightning_shard.processes.script_processes import refuse_a_program_without_a_file

FLAGS = """
import os, subprocess, sys
from lightning_shard.processes.script_processes import flags_of_python

before = dict(os.environ)
flags = "import sys; print(sys.flags, sys.warnoptions)"
with flags_of_python():
    inside = subprocess.run([sys.executable, "-c", flags], capture_output=True, text=True)
print(inside.stdout, end="")
print(sys.flags, sys.warnoptions)
print(dict(os.environ) == before)
"""
TRAINING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Conv2d(1, 1, 3, padding=1)

    def training_step(self, batch, index):
        y = self.network(batch)
        assert y.isfinite().all()
        return y.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    module, data = Module(), DataLoader(torch.randn(4, 1, 5, 4), 2)
    strategy = HybridShardStrategy(domain_parallel_size=DEVICES)
    Trainer(
        accelerator="cpu", devices=DEVICES, max_epochs=1, logger=False, strategy=strategy,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, data)
    print(__debug__, module.network.weight.sum().item())
"""


def run(*flags: str, **variables: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    command = [sys.executable, *flags]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "flags", ["", "-O", "-OO", "-W error -W ignore::UserWarning", "-X dev", "-X utf8 -B -s -P"]
)
def test_flags_of_python(flags):
    inside, outside, same = run(*flags.split(), "-c", FLAGS)
    assert inside == outside
    assert same == "True"


def test_a_python_without_variables():
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
    inside, outside, same = run("-I", "-c", path + FLAGS, PYTHONOPTIMIZE="2")
    assert "optimize=0" in inside
    assert "optimize=0" in outside
    assert same == "True"


@pytest.mark.parametrize(
    ("name", "module", "sentence"),
    [
        ("", None, "this one comes from standard input"),
        ("-", None, "this one comes from standard input"),
        ("-c", None, "this one comes from the option -c of Python"),
        ("gone.py", None, r"'/\S*/gone.py' is no file; where the folder was changed"),
        ("app.zip", "__main__", "this one is a folder or an archive, 'app.zip'"),
        ("folder", "__main__", "this one is a folder or an archive, 'folder'"),
        ("app.py", None, None),
        ("app.py", "package.app", None),
    ],
)
def test_a_program_that_cannot_be_run_again_is_refused(
    name, module, sentence, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("app.zip").touch()
    Path("app.py").touch()
    Path("folder").mkdir()
    program = types.ModuleType("__main__")
    program.__spec__ = module and ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.delitem(sys.modules, "hydra", raising=False)
    if sentence is None:
        refuse_a_program_without_a_file()
        return
    with pytest.raises(RuntimeError, match=sentence) as caught:
        refuse_a_program_without_a_file()
    assert str(caught.value).endswith("or as a module, `python -m package.train`.")


@pytest.mark.slow
def test_asserts_are_left_out_on_all_ranks(tmp_path):
    """An assert that rank 0 alone leaves out would exchange what the others wait for."""
    for ranks in (1, 2):
        (tmp_path / f"{ranks}.py").write_text(TRAINING.replace("DEVICES", str(ranks)))
    (alone,) = run("-O", str(tmp_path / "1.py"))
    assert alone.startswith("False ")
    on_ranks = run("-O", str(tmp_path / "2.py"))
    assert [line.split()[0] for line in on_ranks] == ["False"] * 2
    for line in on_ranks:
        assert float(line.split()[1]) == pytest.approx(float(alone.split()[1]), rel=1e-5)
