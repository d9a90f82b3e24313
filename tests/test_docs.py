"""What the documents name exists."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = "lightning_shard|lightning_modules|tests|docs|configs|benchmarks|notebooks"
FILE = re.compile(rf"(?<![\w./])(?:{FOLDERS})/[\w./*-]*\.(?:py|md|yaml|ipynb|toml|cpp)(?![\w*])")


@documents
def test_links_lead_somewhere(document):
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, f"{document.name} links to {missing}"


@documents
def test_headings_leave_out_no_level(document):
    """The site's builder takes such a heading for an error."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[:1] == [1]
    assert all(new <= old + 1 for old, new in itertools.pairwise(levels)), levels


@documents
def test_files_that_are_named_exist(document):
    named = FILE.findall(document.read_text())
    missing = sorted({name for name in named if not [*ROOT.glob(name)]})
    assert not missing, f"{document.name} names {missing}"


ROOMS = "processes|domain|ops|tensor|points|memory|fsdp|checkpoint|trainer|lab|cli"


@documents
def test_modules_that_are_named_by_their_room_exist(document):
    """Of `fsdp/parallelize.py` the folder of the package is understood."""
    words = CODE.findall(document.read_text())
    named = [
        word for word in words if re.fullmatch(rf"(?:{ROOMS})/[\w/]*(?:\.py)?|data/\w+\.py", word)
    ]
    missing = [name for name in named if not (ROOT / "lightning_shard" / name).exists()]
    assert not missing, f"{document.name} names {missing}"


def test_the_picture_has_the_rooms_of_the_contract_in_their_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in contracts["contracts"] if c["type"] == "layers"]
    picture = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    assert re.findall(r"^([a-z]+)  +\w", picture, re.MULTILINE) == layers
    above, below = picture.split("----")[0], picture.split("----")[-1]
    (no_lightning,) = [
        c for c in contracts["contracts"] if "lightning" in c.get("forbidden_modules", ())
    ]
    rooms = {name.removeprefix("lightning_shard.") for name in no_lightning["source_modules"]}
    assert {room for room in layers if re.search(rf"^{room} ", below, re.MULTILINE)} == rooms
    assert {room for room in layers if re.search(rf"^{room} ", above, re.MULTILINE)} == (
        set(layers) - rooms
    )


@pytest.mark.parametrize("task", ["rule", "launcher", "device", "workload"])
def test_what_to_touch_for_an_addition_is_a_table_of_files(task):
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split(f"## How to add a {task}\n")[1].split("\n## ")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(files) >= 2
    assert [file for file in files if not (ROOT / file).is_file()] == []
