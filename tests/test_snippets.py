"""Every block of Python or of commands in README and docs runs here, or says why it does not.

The line above a block says how it runs:

    <!-- run: script -->       by itself, in a process of its own
    <!-- run: with NAME -->    the same, if that package is installed
    <!-- run: ranks 2 -->      on ranks, after `ON_RANKS`
    <!-- run: alone -->        in one process, after `ALONE`
    <!-- run: xpu -->          by tests/trainer/xpu/test_features.py, after README's program
    <!-- run: commands -->     each line in a shell, in a folder with README's program
    <!-- run: parse -->        the options of each `fit` are read, and nothing is trained
    <!-- run: file NAME -->    a file of a page that makes several; `add to NAME` adds to it
    <!-- not run: why -->

`slow` at its end keeps it out of the default run. A block imports what it uses, so that it can be
pasted; only `field` and `model` of ranks, and `module` and `data` of one process, are the reader's.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import lightning_shard
from lightning_shard.cli import main as cli
from lightning_shard.cli.words import read_words
from lightning_shard.ops import registry
from lightning_shard.trainer import process_mesh
from tests.checkpoint.tiny import leave_group
from tests.pool import pool_of

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
TRIED_ELSEWHERE = {"tutorial_300_lines.md": "tests/test_tutorial.py"}
LANGUAGES = {"python", "bash", "yaml"}
ON_RANKS = """
import torch
field = torch.randn(2, 1, 13, 8)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.GELU())
"""
ALONE = """
from train import Fields as MyData, Shift as MyModule
module, data = MyModule(), MyData()
"""


def blocks(*kinds):
    """The blocks whose mark begins with one of the words, as (page:line, arguments, text)."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            mark, language, code = match.groups()
            if page.name in TRIED_ELSEWHERE or language not in LANGUAGES:
                continue
            line = text[: match.start(3)].count("\n") + 1
            kind = (mark or "").removeprefix("run: ").split(" ")
            if kind[0] in kinds or not kinds:
                marks = [pytest.mark.slow] if kind[-1] == "slow" else []
                found.append(pytest.param(mark, code, id=f"{page.name}:{line}", marks=marks))
    return pytest.mark.parametrize(("mark", "code"), found)


@blocks()
def test_it_runs_or_says_why_not(mark, code):
    assert mark is not None, "no word says how this block is run"
    how, _, what = mark.partition(": ")
    known = {"script", "with", "ranks", "alone", "xpu", "commands", "parse", "file", "add"}
    assert (how == "run" and what.split()[0] in known) or (how == "not run" and len(what) > 10)


LIBRARIES = {*dir(lightning_shard), *"lightning_shard torch nn F dist np os pathlib".split()}
LIBRARIES |= {"Trainer", "LightningModule", "LightningDataModule", "DataLoader", "ModelCheckpoint"}


@blocks()
def test_it_imports_what_it_uses(mark, code):
    """Also a block that does not run; what a reader has, such as `module`, is the reader's."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except SyntaxError:  # commands, YAML
        return
    if mark.startswith(("not run: what you have", "run: add to")):
        return
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
    assert not ({name.id for name in names} - known) & LIBRARIES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with README's program in it, and what configs name."""
    (program,) = [
        code
        for mark, _, code in BLOCK.findall((ROOT / "README.md").read_text())
        if "script" in mark
    ]
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    sys.modules.pop("train", None)
    leave_group()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@blocks("script")
def test_script(folder, mark, code):
    (folder / "program.py").write_text(code)
    assert "split over the domain" in run([sys.executable, "program.py"])


@pytest.mark.slow
@blocks("with")
def test_with_a_package(folder, mark, code):
    name = mark.split()[-1]
    pytest.importorskip(name, reason=f"{name} is none of the test dependencies")
    test_script(folder, mark, code)


def execute(code):
    with mock.patch.dict(registry._RULES):  # which a block may add to
        exec(compile(ON_RANKS + code, "snippet", "exec"), {})


@blocks("ranks")
def test_on_ranks(mark, code):
    pool_of(int(mark.split()[-1])).run(execute, {"code": code})


@blocks("alone")
@pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and logging intervals
def test_alone(folder, mark, code):
    with (
        contextlib.redirect_stdout(io.StringIO()),
        # it would start this session of pytest once more, as the program's second process
        mock.patch.object(process_mesh, "SubprocessScriptLauncher", side_effect=AssertionError),
    ):
        exec(compile(ALONE + code, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.slow
@blocks("commands")
def test_commands(folder, mark, code):
    for line in code.splitlines():
        run(["bash", "-c", line])


def fits(code):
    """The words after `lightning_shard` of each command that reads a config."""
    lines = code.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [
        line[line.index("lightning_shard") + 1 :] for line in words if "lightning_shard" in line
    ]


@blocks("parse", "commands")
def test_options(folder, capsys, mark, code):
    """`check`, `plan` and `certify` take the options of `fit`."""
    found = [words for words in fits(code) if words[0] in {"fit", "check", "plan", "certify"}]
    assert found or "torchrun" in code
    for command, *options in found:
        if command == "certify":
            _, options = read_words("certify", options)
        if command == "plan":
            _, options = read_words("plan", options)
        with pytest.raises(SystemExit) as ended:
            cli.main(["fit", *options, "--print_config"])
        assert ended.value.code == 0, capsys.readouterr().err


def write_a_rule(slope, try_slope, rule):
    made = ModuleType("slope")
    with mock.patch.dict(registry._RULES), mock.patch.dict(sys.modules, {"slope": made}):
        exec(slope, vars(made))
        exec(try_slope, program := {"__name__": "try_slope"})
        refusal = "cannot run torch.ops.mine.slope.default on a tensor split"
        with pytest.raises(lightning_shard.UnsupportedOperationError, match=refusal):
            program["compare"]()
        exec(rule, vars(made))
        program["compare"]()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_rule_is_written_from_failure_to_test(ranks):
    """The files of the page fail without the rule, and pass with it."""
    page = (ROOT / "docs" / "refused.md").read_text()
    files = {mark: code for mark, _, code in BLOCK.findall(page)}
    names = {"slope": "file slope.py", "try_slope": "file try_slope.py", "rule": "add to slope.py"}
    codes = {name: files[f"run: {mark}"] for name, mark in names.items()}
    pool_of(ranks).run(write_a_rule, codes)
