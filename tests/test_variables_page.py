"""docs/variables.md has every variable of the environment that is ours."""

import re
from pathlib import Path

from lightning_shard.cli.positions import OWN_VARIABLES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "variables.md").read_text()


def test_each_variable_is_on_the_page():
    assert {f"LIGHTNING_SHARD_{name}" for name in OWN_VARIABLES} <= set(
        re.findall(r"\bLIGHTNING_SHARD_[A-Z_]+\b", PAGE)
    )
    code = "".join(path.read_text() for path in ROOT.glob("lightning_shard/**/*.py"))
    ours = set(re.findall(r"(?<!_)\bLIGHTNING_SHARD_[A-Z]+[A-Z_]*\b", code))
    assert ours <= set(re.findall(r"\bLIGHTNING_SHARD_[A-Z_]+\b", PAGE)), ours


def test_each_variable_of_the_page_is_read():
    code = "".join(path.read_text() for path in ROOT.glob("lightning_shard/**/*.py"))
    theirs = PAGE.partition("## Of others")[2]
    for row in re.findall(r"^\| (`.*?) \|", theirs, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", row):
            assert name in code, name
