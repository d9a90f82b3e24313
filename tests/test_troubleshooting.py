"""docs/troubleshooting.md quotes messages that the package has, and that tests raise."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TABLES = PAGE.partition("## A number looks wrong")[0]
MESSAGES = re.findall(r"^\| `([^|]+?)` \|", TABLES, re.MULTILINE)
SHORTEST = 12  # letters by which a part of a message is told from others
ALIKE = 18  # letters that a test quotes of it at least


def words_of(node: ast.AST) -> str:
    """The text of a literal; what an f-string fills in is a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(v) or "\0" for v in node.values)
    return ""


@cache
def literals(folder: str) -> list[str]:
    """The texts of all literals of the Python files of a folder; backslashes are left out."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != Path(__file__):
            found += map(words_of, ast.walk(ast.parse(path.read_text())))
    return [text.replace("\\", "") for text in found if len(text) >= SHORTEST]


def parts_of(message: str) -> list[str]:
    return [part.strip(" '(),;:") for part in message.split("...")]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_raised(message: str) -> None:
    parts = [part for part in parts_of(message) if len(part) >= SHORTEST]
    assert parts, "nothing to look for"
    for part in parts:
        assert any(part in text for text in literals("lightning_shard")), f"no code has {part!r}"
    # a test quotes as much of a message as it needs
    runs = [part[i : i + ALIKE] for part in parts for i in range(max(1, len(part) - ALIKE + 1))]
    assert any(run in text for run in runs for text in literals("tests")), "no test has it"


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 25
