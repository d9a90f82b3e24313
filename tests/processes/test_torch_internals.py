"""What torch does not promise: all names are there, and other files do without."""

import ast
import re
from pathlib import Path

import pytest
import torch

import lightning_shard
from lightning_shard.processes.torch_private import names

# of modules of torch 2.11, as they are imported
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
ROOT = Path(lightning_shard.__file__).parent


@pytest.mark.slow
def test_every_internal_name_is_there():
    assert names.missing() == []


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_imports(tree: ast.AST) -> list[str]:
    """The private names of other packages that a file imports, at its top or within."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [path for path in found if any(map(_private, path.split(".")))]


def _private_attributes(tree: ast.AST) -> set[str]:
    """The private attributes of other objects than `self` that a file reads or sets."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and _private(node.attr)
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    }


def _defined(tree: ast.AST) -> set[str]:
    """The private attributes that a file gives to its own classes and objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target).removeprefix("self."))
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            found.update(n.removeprefix("self.") for n in names if n.startswith("self."))
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)  # attributes of mixins
    return found


PAGES = ("processes/torch_private/internals.py", "trainer/host.py")  # of torch and of Lightning
PUBLIC = {"_current_frames", "_exit", "_getframe", "_replace"}  # which Python documents


def test_no_other_file_uses_private_names():
    trees = {str(f.relative_to(ROOT)): ast.parse(f.read_text()) for f in ROOT.rglob("*.py")}
    own = set[str]().union(PUBLIC, *map(_defined, trees.values()))
    own -= vars(torch.nn.Module()).keys()
    for name, tree in trees.items():
        if name not in PAGES:
            assert _private_imports(tree) == [], name
            assert _private_attributes(tree) - own == set(), name
    # the test sees what stands on the pages
    assert {"_cdata", "_backward_cls"} <= _private_attributes(trees[PAGES[0]]) - own


@pytest.mark.slow
def test_a_removed_name_is_listed_with_what_breaks(monkeypatch):
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    monkeypatch.delattr(torch.distributed.device_mesh.DeviceMesh, "_flatten")
    lost = names.missing()
    assert [line.partition(":")[0] for line in lost] == [
        "torch._C._is_any_autocast_enabled",
        "torch.distributed.device_mesh.DeviceMesh._flatten",
    ]
    names.internal.cache_clear()
    with pytest.raises(ImportError, match=r"(?s)_is_any_autocast_enabled.*_flatten"):
        names.internal("torch._C._is_any_autocast_enabled")


def test_the_page_says_what_would_change_and_which_test_sees_it():
    page = (ROOT.parent / "docs/architecture.md").read_text()
    table = page.split("| names | what would change in silence | seen by |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:4] for row in table.split("\n")[2:]]
    told = {name for cell, _, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    listed = {path.split("|")[0].rpartition(".")[2] for path in names.INTERNALS}
    assert told == listed
    files = [file for _, _, seen in rows for file in re.findall(r"`([^`]+)`", seen)]
    assert all((ROOT.parent / file).is_file() for file in files)
    assert len(names.INTERNALS) <= 80  # it only shrinks


def test_the_page_says_who_looks_at_frames():
    """And who changes classes: with what breaks without it, and the test that shows it."""
    page = (ROOT.parent / "docs/architecture.md").read_text()
    table = page.split("| file | looks at | without it | seen by |")[1].split("\n\n")[0]
    rows = [row.split("|")[1:5] for row in table.strip().split("\n")[1:]]
    told = {re.findall(r"`([^`]+)`", row[0])[0] for row in rows}
    looks = re.compile(
        r"\b(_getframe|_current_frames|f_globals|f_locals|walk_tb|f_code)\b|\.__class__ = "
    )
    files = [f for f in ROOT.rglob("*.py") if looks.search(f.read_text())]
    assert {str(file.relative_to(ROOT)) for file in files} <= told
    assert all((ROOT / file).is_file() for file in told)
    assert all((ROOT.parent / row[3].strip(" `")).is_file() for row in rows)
