"""What editors and `--help` show of the public names: each argument described, nothing broken."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docstring_parser.common import ParseError
from docstring_parser.google import GoogleParser

import lightning_shard

WITHOUT_ARGUMENTS = {"functional"}


def described(text: str | None) -> dict[str, str]:
    return {p.arg_name: p.description or "" for p in GoogleParser().parse(text or "").params}


def documented(name: str) -> tuple[set[str], dict[str, str]]:
    """The arguments of a public name, and those that its docstring describes."""
    value = getattr(lightning_shard, name)
    if dataclasses.is_dataclass(value):
        return {f.name for f in dataclasses.fields(value)}, described(inspect.getdoc(value))
    if not inspect.isclass(value):
        return set(inspect.signature(value).parameters), described(inspect.getdoc(value))
    if "__init__" not in vars(value):
        return set(), {}
    parameters = set(inspect.signature(value.__init__).parameters) - {"self"}
    return parameters, described(value.__doc__) | described(value.__init__.__doc__)


@pytest.mark.parametrize("name", sorted(set(dir(lightning_shard)) - WITHOUT_ARGUMENTS))
def test_described_arguments_exist(name):
    """A wrapped line that is not indented looks like an argument: "domain." for one."""
    parameters, words = documented(name)
    assert set(words) <= parameters, sorted(set(words) - parameters)
    assert all(words.values())


@pytest.mark.parametrize("name", ["HybridShardStrategy", "ShardingOptions", "parallelize"])
def test_all_arguments_are_described(name):
    parameters, words = documented(name)
    assert parameters == set(words)


def test_the_strategy_has_few_arguments():
    assert len(documented("HybridShardStrategy")[0]) <= 14


def test_a_broken_line_is_found():
    broken = """Do.

    Args:
        size: All processes divided by the
        domain.
    """
    with pytest.raises(ParseError, match="domain"):
        described(inspect.cleandoc(broken))


NO_VERB = r"(The|This|A|An|All|Each|One) \S"  # of a function
NO_SUBJECT = r"(Of|As|What|Which|Whose|Whether|How|Those|For) "
MARKS = r"property|setter|implements"  # attributes, and rules, which say what travels
ARGUMENT = re.compile(rf"^ +\w+( \(.*\))?: {NO_SUBJECT}", re.MULTILINE)
PACKAGE = Path(lightning_shard.__file__).parent


def definitions(node: ast.AST, public: bool = True) -> Iterator[tuple[Any, bool]]:
    """Functions and classes below a node, and whether a reader of the module may use them."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from definitions(child, public)
            continue
        named = not child.name.startswith("_")
        yield child, public and named
        yield from definitions(child, public and named and isinstance(child, ast.ClassDef))


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir()))
def test_docstrings_are_sentences_with_a_subject(room):
    wrong = []
    for path in (
        [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    ):
        tree = ast.parse(path.read_text())
        for node, is_public in [(tree, False), *definitions(tree)]:
            words = ast.get_docstring(node) or ""
            place = f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'the module')}"
            if re.match(NO_SUBJECT, words) or ARGUMENT.search(words):
                wrong.append(f"{place} begins without a subject")
            if is_public and not words:
                wrong.append(f"{place} has none")
            marks = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            returns = isinstance(node, ast.FunctionDef) and not re.search(MARKS, marks)
            if is_public and returns and re.match(NO_VERB, words):
                wrong.append(f"{place} begins with a noun, where a verb says what it does")
    assert not wrong, "\n".join(wrong)


MODULES = PACKAGE.parent / "lightning_modules"
COMMENT = re.compile(r"# (of|what|which|whose) ")


def test_comments_are_sentences_with_a_subject():
    """ "a = 1  # of the ranks" has no subject: "a = 1  # one for each rank"."""
    found = []
    for path in [*PACKAGE.rglob("*.py"), *MODULES.rglob("*.py")]:
        before = ""
        for line in path.read_text().splitlines():
            is_first = not before.lstrip().startswith("#") or not line.lstrip().startswith("#")
            if COMMENT.search(line) and is_first:
                found.append(f"{path.relative_to(PACKAGE.parent)}: {line.strip()}")
            before = line
    assert not found, "\n".join(found)


def test_a_docstring_without_a_subject_is_found():
    code = 'def f():\n    """Of the run."""\n\nclass A:\n    def g(self): ...\n'
    found = [(node.name, is_public) for node, is_public in definitions(ast.parse(code))]
    assert found == [("f", True), ("A", True), ("g", True)]
    assert re.match(NO_SUBJECT, "Of the run.")
    assert ARGUMENT.search("    rows: What the rank has.")
