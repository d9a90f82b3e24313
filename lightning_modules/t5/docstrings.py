"""A corpus that every Python environment holds: docstrings, to be summarized in their first line.

The source is the signature and the rest of the docstring; the summary is the first line. Files are
parsed, never imported. Three rules keep the task honest: a summary occurs once, so that none of
validation was seen in training; so does a body; and what bears the same name is in the same split,
since overrides are described in each other's words.
"""

import ast
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from typing_extensions import override

from lightning_modules.shared.cached import cached, digest, write_whole
from lightning_modules.t5.corpus import Corpus, Pair, Split, split_of

VERSION = 1  # raised whenever the rules change
SUMMARY_WORDS = range(3, 21)
BODY_WORDS = 5  # at least
SOURCE_CHARACTERS = 600  # at most

NOTE = """# Where these {count} docstrings come from

They were read from packages that are installed on this machine, and stay under the licences of
these: follow them when you pass the file on.

| package | version | licence | docstrings |
| --- | --- | --- | --- |
{rows}
"""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NESTING = (*_DEFINITIONS, ast.If, ast.Try, ast.With)
_RULE = re.compile(r"\s*[-=~^*]+\s*")  # the line under a heading
_MARKUP = [
    (re.compile(r":[\w:]+:`[~.!]?([^`<]*)[^`]*`"), r"\1"),  # Sphinx's roles: :func:`name`
    (re.compile(r"(?<!\S)\*{1,2}([^*\s]+)\*{1,2}"), r"\1"),  # emphasis
    (re.compile(r"`|>>>"), ""),
]


class Docstring(NamedTuple):
    """Holds the name of a definition, and its docstring as a text with a summary."""

    name: str
    source: str
    summary: str


class Package(NamedTuple):
    """Describes Python source on this machine, and the terms under which it is there."""

    name: str
    version: str
    licence: str
    files: Callable[[], list[Path]]


@dataclass(frozen=True)
class Docstrings(Corpus):
    """Pairs docstrings of the standard library and of packages with their summary lines.

    The pairs are kept in a file, beside a note of the packages and of their licences.

    Attributes:
        packages: Installed distributions to read beside the standard library, such as
            `["torch", "scikit-learn"]`; by default all of them.
        root: Folder of the file.
    """

    packages: list[str] | None = None
    root: str = "data/docstrings"

    @override
    def pairs(self) -> Iterator[tuple[Split, Pair]]:
        packages = installed(self.packages)
        key = digest([str(VERSION), *(f"{p.name} {p.version}" for p in packages)])
        path = Path(self.root) / f"docstrings_{key}.json.gz"
        for name, source, summary in cached(path, lambda: read(packages, path)):
            yield split_of(name), Pair(source, summary)


def read(packages: Iterable[Package], path: Path) -> list[Docstring]:
    """Read the docstrings of packages, and write a note of these beside `path`.

    Args:
        packages: The packages to read.
        path: A file `*.json.gz`, which the caller writes; the note is `*_packages.md`.

    Returns:
        Docstrings without repetitions, in an order that has nothing to do with the packages, so
        that the first thousand are like all.
    """
    rank_zero_info(f"Reading docstrings of installed packages, once: {path}")
    found: list[Docstring] = []
    seen: set[str] = set()
    rows: list[str] = []
    for package in tqdm(packages, desc="reading docstrings", unit=" packages"):
        before = len(found)
        for each in (each for file in package.files() for each in docstrings_of(file)):
            words = " ".join(re.findall("[a-z]+", each.summary.lower()))
            body = each.source.split(": ", 1)[-1]
            if not {words, body} & seen:
                seen |= {words, body}
                found.append(each)
        if count := len(found) - before:
            rows.append(f"| {package.name} | {package.version} | {package.licence} | {count} |")
    note = NOTE.format(count=len(found), rows="\n".join(rows))
    write_whole(path.with_name(path.name.replace(".json.gz", "_packages.md")), note.encode())
    return sorted(found, key=digest)


def installed(names: Iterable[str] | None) -> list[Package]:
    """Find packages on this machine, in the order of their names.

    Args:
        names: Installed distributions; None for all.

    Returns:
        The standard library and these distributions.

    Raises:
        ValueError: A distribution is not installed.
    """
    library = _standard_library()
    found = {library.name: library}
    for distribution in metadata.distributions():
        if distribution.metadata.get_all("Name"):  # else it is what an installer left behind
            package = _package(distribution)
            found.setdefault(package.name, package)
    wanted = set(found) if names is None else {library.name, *map(_normal, names)}
    if missing := sorted(wanted - set(found)):
        raise ValueError(
            f"packages must name installed distributions; {missing[0]} is not installed: install "
            "it, or leave it out."
        )
    return [found[name] for name in sorted(wanted)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _standard_library() -> Package:
    folder = Path(sysconfig.get_path("stdlib"))

    def files() -> list[Path]:
        others = {"site-packages", "dist-packages"}
        return _to_read(folder, (p for p in folder.rglob("*.py") if not others & {*p.parts}))

    return Package("python", platform.python_version(), "PSF-2.0", files)


def _package(distribution: metadata.Distribution) -> Package:
    about = distribution.metadata
    stated = [*about.get_all("License-Expression", []), *about.get_all("License", [])]
    classes = [c for c in about.get_all("Classifier", []) if c.startswith("License ::")]
    short = [line for line in stated if "\n" not in line.strip()]  # others are the whole text
    lines = "\n".join([*short, *classes, *stated, "not stated"]).strip().splitlines()
    licence = lines[0].rsplit(" :: ", 1)[-1]

    def files() -> list[Path]:
        folder = Path(str(distribution.locate_file("")))
        listed = distribution.files or []
        return _to_read(folder, (Path(str(distribution.locate_file(f))) for f in listed))

    return Package(_normal(about["Name"]), distribution.version, licence, files)


def _to_read(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return Python files other than tests."""
    return sorted(
        path
        for path in files
        if path.suffix == ".py"
        and path.is_relative_to(folder)
        and not any(part.startswith("test") for part in path.relative_to(folder).parts)
    )


def docstrings_of(path: Path) -> Iterator[Docstring]:
    """Read the docstrings of a file that have more than a summary; none of what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's source has wrong escape sequences
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, FileNotFoundError):
        return  # templates, files for other versions of Python, entries of lists that are gone
    for owner, node in _definitions(tree):
        text = ast.get_docstring(node)
        if text and (pair := _pair(text, node, owner)):
            yield Docstring(node.name, *pair)


def _definitions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the definitions in `node`, each with the name of the class that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITIONS):
            yield owner, child
        if isinstance(child, _NESTING):
            inner = child.name if isinstance(child, ast.ClassDef) else owner
            yield from _definitions(child, inner)


def _pair(text: str, node: Definition, owner: str) -> Pair | None:
    """Pair the summary line with signature and rest; None where there is little to summarize."""
    first, _, rest = text.partition("\n\n")
    summary, body = _plain(first), _plain(rest)
    name = _spelled(node.name)
    words = re.findall("[a-z0-9]+", summary.lower())
    trivial = set(words) <= set(name.lower().split())
    if len(words) not in SUMMARY_WORDS or not summary[:1].isalpha() or trivial:
        return None
    if len(body.split()) < BODY_WORDS:
        return None
    signature = f"{name} of {_spelled(owner)}" if owner else name
    if not isinstance(node, ast.ClassDef):
        signature += f" ({', '.join(map(_spelled, _arguments(node)))})"
    return Pair(f"{signature}: {body}"[:SOURCE_CHARACTERS], summary)


def _plain(text: str) -> str:
    """Return one line without markup."""
    lines = " ".join(line for line in text.splitlines() if not _RULE.fullmatch(line))
    for pattern, kept in _MARKUP:
        lines = pattern.sub(kept, lines)
    return " ".join(lines.split())


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _spelled(name: str) -> str:
    """Split an identifier into words: "get_maxSize" is "get max size"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).strip()
