"""Refuses misspelt names of options before torch is imported, which takes many seconds.

The arguments of a class are read from the text of its file. Where that does not tell them, as of a
class with `**kwargs` or of one that inherits its constructor, the parser looks later.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightning_shard.cli.positions import WORKLOADS, Given, bare
from lightning_shard.cli.usage import UsageError
from lightning_shard.processes.nearest import nearest

SPEC = ("class_path", "init_args", "dict_kwargs")
# it has the constructor of our strategies
STRATEGY = "lightning_shard.trainer.on_mesh.ShardStrategy"
_TRAINERS = (
    "lightning.pytorch.trainer.trainer.Trainer",
    "pytorch_lightning.trainer.trainer.Trainer",
)
_OWN = ("", "hybrid_shard", "HybridShardStrategy", "lightning_shard.HybridShardStrategy")
_MOST_FILES = 200  # are searched in a package whose first page does not define the class


def check_names(given: Given, command: str) -> None:
    """Look for names below `trainer`, `trainer.strategy`, `model` and `data` that a class lacks.

    Args:
        given: The options that the user wrote.
        command: The subcommand, whose help is named.

    Raises:
        UsageError: A name is unknown; the sentence has the nearest one.
    """
    for section, path in _classes(given):
        depth = section.count(".") + 1
        written = (bare(option.key).split(".") for option in given.options)
        used = {p[depth] for p in written if ".".join(p[:depth]) == section and len(p) > depth}
        names = arguments_of(path) if (used := used - {*SPEC, "help"}) else None
        if names is None or (len(used) > 1 and not used & {*names}):  # perhaps the class is wrong
            continue
        for name in sorted(used - {*names}):
            option = given.last(f"{section}.{name}")
            if option is not None and not option.where.startswith("in the variable"):
                close = nearest(name, SPEC, "") or nearest(name, names)
                hint = f"all options: python -m lightning_shard {command} --help all"
                raise UsageError(f"unknown option '{option.key}' {option.where}{close}", hint)


def _classes(given: Given) -> Iterator[tuple[str, str]]:
    """Give each section with the path of its class, where all that was written names one."""
    trainer = next((path for path in _TRAINERS if find_spec(path.split(".")[0])), "")
    yield "trainer", trainer
    for section in ("trainer.strategy", "model", "data"):
        keys = (section, f"{section}.class_path")
        paths = {o.text for o in given.options if bare(o.key) in keys} - {""}
        if section == "trainer.strategy" and not paths - {*_OWN}:
            yield section, STRATEGY
        elif len(paths) == 1:
            yield section, paths.pop()


def arguments_of(path: str) -> list[str] | None:
    """Return the names that a class is made with; None if its file does not tell.

    Args:
        path: Such as `my_package.MyModule`, or the name of a workload's class.
    """
    module, _, name = path.rpartition(".")
    if not name.isidentifier():
        return None
    for file in _files_of(module or WORKLOADS):
        text = file.read_text(encoding="utf-8", errors="replace")
        if f"class {name}" in text:
            try:
                body = ast.parse(text).body
            except SyntaxError:  # importing it says where
                return None
            for node in body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return _arguments(node)
    return None


def _arguments(found: ast.ClassDef) -> list[str] | None:
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            takes_more = node.args.kwarg or node.args.vararg
            own = [a.arg for a in (*node.args.args[1:], *node.args.kwonlyargs)]
            return None if takes_more else own
    return None


def _files_of(module: str) -> Iterator[Path]:
    """Find the file of a module without importing it; of a package all its files."""
    top, *below = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    if not below and spec.origin and not spec.submodule_search_locations:
        yield Path(spec.origin)
    for place in spec.submodule_search_locations or ():
        path = Path(place, *below)
        if path.with_suffix(".py").is_file():
            yield path.with_suffix(".py")
        elif path.is_dir():
            yield from sorted(path.rglob("*.py"))[:_MOST_FILES]
