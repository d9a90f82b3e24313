"""Classes and types in words: the classes that fit, and what a type hint accepts."""

import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from lightning_shard.cli.sources import Sources
from lightning_shard.cli.usage import nearest

WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
}


def import_short_names(given: Sources | None = None) -> None:
    """Import the classes of the workloads that may be named without their module.

    Args:
        given: What the user gave: only classes that it names are imported; None for all of them.
    """
    if importlib.util.find_spec("lightning_modules") is None:
        return
    workloads = importlib.import_module("lightning_modules")
    words = None if given is None else given.words()
    for name in dir(workloads):
        if words is None or name in words:
            with suppress(ModuleNotFoundError):  # said where the class is used
                getattr(workloads, name)


def describe(hint: Any) -> str:
    """A type hint in words."""
    parts = [p for p in flatten(hint) if not (is_number(hint) and class_hints(p))]
    words = [_word(part) for part in parts if get_origin(part) is not Literal]
    if choices := literals(hint):
        words.insert(0, "one of " + ", ".join(choices) if len(choices) > 1 else choices[0])
    if len(words) > 1 and "null" in words:
        words.remove("null")
        words.append("null")
    return " or ".join(dict.fromkeys(words))


def literals(hint: Any) -> list[str]:
    """The words that a type hint lists."""
    parts = (part for part in flatten(hint) if get_origin(part) is Literal)
    return list(dict.fromkeys(str(value) for part in parts for value in get_args(part)))


def is_number(hint: Any) -> bool:
    """Whether a number fits, so that a word can only be a mistyped number."""
    return any(part in (int, float) for part in flatten(hint))


def takes_mapping(hint: Any) -> bool:
    """Whether any keys fit, so that none is mistyped."""
    return any(dict in (part, get_origin(part)) for part in flatten(hint))


def flatten(hint: Any) -> Iterator[Any]:
    """The members of a union, nested ones too."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from flatten(part)
    else:
        yield hint


def class_hints(hint: Any) -> list[tuple[type, int]]:
    """The classes that a hint accepts, with the number of arguments that its caller fills in."""
    found: list[tuple[type, int]] = []
    for part in flatten(hint):
        origin, inner = get_origin(part), get_args(part)
        if isinstance(part, type) and part not in WORDS and origin is None:
            found.append((part, 0))
        elif origin in (list, tuple, Iterable) and inner:
            found += class_hints(inner[0])
        elif origin is Callable:
            arguments = len(inner[0]) if inner and isinstance(inner[0], list) else 0
            found += [(base, arguments) for base, _ in class_hints(inner[-1])] if inner else []
    return found


def find_class(path: str, bases: list[type]) -> tuple[type | None, str]:
    """Import a class by its path or short name; otherwise say in words why not."""
    if "/" in path or path.endswith(".py"):
        return None, ": name it as an import does, such as my_package.MyModule"
    module_name, _, name = path.rpartition(".")
    known = {cls.__name__: cls for base in bases for cls in _family(base)}
    if not module_name:
        return (known[name], "") if name in known else (None, nearest(name, known))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as err:
        if err.name and (module_name == err.name or module_name.startswith(err.name + ".")):
            return None, f": there is no module '{err.name}'{nearest(name, known)}"
        return None, f": importing '{module_name}' failed: {err}"
    except Exception as err:
        return None, f": importing '{module_name}' failed: {type(err).__name__}: {err}"
    try:
        found = getattr(module, name, None)
    except ModuleNotFoundError as err:
        return None, f": {err}".rstrip(".")
    if found is None:
        here = [n for n, v in vars(module).items() if isinstance(v, type) and _fits(v, bases)]
        exported = [n for n in dir(module) if not n.startswith("_") and n in known]
        return None, f": '{module_name}' has no '{name}'{nearest(name, {*here, *exported})}"
    if isinstance(found, type) and not _fits(found, bases):
        wanted = " or ".join(base.__name__ for base in bases)
        return None, f": it is not a {wanted}"
    return (found, "") if isinstance(found, type) else (None, ": it is not a class")


@cache
def parameters(cls: type, skip: int = 0) -> dict[str, Any]:
    """Names and type hints that the parser accepts for a class, inherited ones included."""
    added = parser_of(cls, skip)[1]
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        with suppress(NameError, TypeError):
            hints |= get_type_hints(vars(base).get("__init__", object.__init__))
    return {name: hints.get(name, inspect.Parameter.empty) for name in added}


@cache
def parser_of(cls: type, skip: int = 0) -> tuple[Any, list[str]]:
    """The parser of a class's arguments, and their names.

    Args:
        cls: The class.
        skip: The number of its first arguments that its caller fills in.
    """
    parser: Any = ArgumentParser(exit_on_error=False)
    first = {skip} if skip else set[int]()
    return parser, parser.add_class_arguments(cls, skip=first, fail_untyped=False, sub_configs=True)


def required(cls: type, skip: int = 0) -> list[str]:
    """Names of a class's own arguments that have no default."""
    own = list(inspect.signature(cls).parameters.values())[skip:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in own if p.default is p.empty and p.kind in kinds]


def accepts(cls: type, name: str, value: object, skip: int = 0) -> bool:
    """Whether the parser takes this value for one argument of a class."""
    try:
        parser_of(cls, skip)[0].validate(Namespace({name: value}), skip_required=True)
    except Exception:
        return False
    return True


def _word(part: Any) -> str:
    origin, inner = get_origin(part), get_args(part)
    if part in WORDS:
        return WORDS[part]
    if origin in (list, tuple, Sequence) and inner:
        return f"a list of {_word(inner[0]).removeprefix('an ').removeprefix('a ')}s"
    if class_hints(part):
        return f"the class_path of a {class_hints(part)[0][0].__name__}"
    return WORDS.get(origin, str(part)) if origin else getattr(part, "__name__", str(part))


def _family(base: type) -> Iterator[type]:
    yield base
    for child in type.__subclasses__(base):
        if not child.__name__.startswith("_"):
            yield from _family(child)


def _fits(cls: type, bases: list[type]) -> bool:
    return not bases or issubclass(cls, tuple(bases))
