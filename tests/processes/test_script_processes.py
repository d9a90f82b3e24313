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
STARTER = """
import subprocess, sys, time
from lightning_shard.processes import script_processes

script_processes.END_S, script_processes.LOOK_S = float(sys.argv[3]), 0.1
processes = [subprocess.Popen([sys.executable, "-c", part]) for part in sys.argv[4:]]
time.sleep(0.2)
with script_processes.own_end():
    script_processes.watch_others(processes)
    exec(sys.argv[1])
exec(sys.argv[2])
print("done")
"""
SOCKET = "import pathlib, socket, time; one = socket.socket(socket.AF_UNIX)\n"
LISTENS = (
    SOCKET + "one.bind('here'); one.listen(); two, _ = one.accept()\n"
    "one.set_inheritable(True); two.set_inheritable(True)"  # as some of gloo's are
)
CONNECTS = (
    SOCKET + "while not pathlib.Path('here').exists(): time.sleep(0.01)\n"
    "time.sleep(0.1); one.connect('here'); one.recv(1); raise SystemExit(6)"
)


def end_of(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    # what is printed waits in the process; else the words of two ranks come into one line
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def run(*flags: str, **variables: str) -> list[str]:
    done = end_of(*flags, **variables)
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


@pytest.mark.parametrize(
    ("inside", "after", "others", "code", "words"),
    [
        ("", "", ["", ""], 0, ["done"]),
        ("", "", ["", "import time; time.sleep(1); print('later')"], 0, ["done", "later"]),
        ("", "", ["", "raise SystemExit(3)"], 3,
         ["done", "LOCAL_RANK 2 ended with exit code 3, after this process had done its part"]),
        ("", "", ["import os, time; time.sleep(1); os.kill(os.getpid(), 9)"], 1,
         ["done", "LOCAL_RANK 1 ended with signal 9, after this process had done its part"]),
        ("", "", ["import time; time.sleep(4)"], 0,
         ["done", "This process has ended its part; it waits for LOCAL_RANK 1."]),
        ("", "", ["", "import time; time.sleep(4); raise SystemExit(7)"], 7,
         ["it waits for LOCAL_RANK 2.", "LOCAL_RANK 2 ended with exit code 7, after this process"]),
        (LISTENS, "", [CONNECTS], 6,
         ["it waits for LOCAL_RANK 1.", "LOCAL_RANK 1 ended with exit code 6, after"]),
        ("time.sleep(60)", "", ["raise SystemExit(3)", "import time; time.sleep(60)"], 3,
         ["LOCAL_RANK 1 ended with exit code 3, and this process had not ended 2 s later"]),
        ("time.sleep(60)", "",
         ["import time; time.sleep(20); print('later')", "raise SystemExit(3)"], 3,
         ["LOCAL_RANK 2 ended with exit code 3, and this process had not ended 2 s later"]),
        ("", "", ["raise SystemExit(143)", "raise SystemExit(3)"], 3,
         ["done", "LOCAL_RANK 2 ended with exit code 3, after this process had done its part"]),
        ("time.sleep(3)", "", [], 0, ["done"]),
        ("raise ValueError('mine')", "", ["raise SystemExit(3)"], 1, ["ValueError: mine"]),
        ("raise SystemExit(130)", "", ["raise SystemExit(1)"], 130, []),
        ("", "raise SystemExit(5)", [""], 5, []),
        ("", "", ["raise SystemExit(130)", "raise SystemExit(143)"], 0, ["done"]),
    ],
)  # fmt: skip
def test_a_script_ends_as_its_processes(inside, after, others, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = end_of("-c", STARTER, inside, after, "2", *others)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert all(word in output for word in words), output
    assert "Traceback" not in output or "mine" in inside, output
    assert ("later\n" in done.stdout) == ("later" in words)
    lines = output.count("LOCAL_RANK")
    assert lines == sum("LOCAL_RANK" in word for word in words), output


@pytest.mark.slow_rows("0-4", "3-0")
@pytest.mark.parametrize(("code", "seconds"), [(0, 4), (3, 0), (3, 4)])
def test_a_script_whose_output_nobody_reads_ends_as_its_processes(code, seconds, tmp_path):
    """As after `python train.py 2>&1 | head`."""
    end = tmp_path / "end"
    other = f"import time; time.sleep({seconds}); open({str(end)!r}, 'w'); raise SystemExit({code})"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", STARTER, "", "", "2", other], stdout=write, stderr=write, check=False
    )
    os.close(write)
    assert end.exists()
    assert done.returncode == code or (not code and done.returncode == 120)  # by Python's own flush


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "end", "words"),
    [
        (1, "raise ValueError('mine')", "The process of LOCAL_RANK 1 ended with exit code 1"),
        (1, "os.kill(os.getpid(), 9)", "The process of LOCAL_RANK 1 ended with signal 9"),
        (1, "torch.distributed.barrier()", "The process of LOCAL_RANK 1 ended with exit code 1"),
        (0, "torch.distributed.new_group([0, 1])", "and all other ranks have come to the end"),
    ],
)
def test_a_script_fails_if_one_rank_fails_at_its_end(rank, end, words, tmp_path):
    program = TRAINING.replace("DEVICES", "2") + (
        "    import os\n"
        f"    if os.environ['LOCAL_RANK'] == '{rank}':\n"
        f"        {end}\n"
    )  # fmt: skip
    (tmp_path / "train.py").write_text(program)
    done = end_of(str(tmp_path / "train.py"))
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
