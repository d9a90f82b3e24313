"""A sentence on what the parser refused: the option, its place and the nearest valid name.

jsonargparse makes a parser for each class that a config names, and each gives its refusal to
`error`, innermost first. The outermost text is nested and names no file; the innermost one says
what is wrong, and its parser knows what would be right.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pydoc import locate
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin

from lightning_shard.cli.positions import COMMAND_LINE, WORKLOADS, Given, Option, bare
from lightning_shard.cli.usage import UsageError
from lightning_shard.lightning import LightningArgumentParser
from lightning_shard.processes.errors import LightningShardError
from lightning_shard.processes.nearest import nearest
from lightning_shard.trainer.host import option_types
from lightning_shard.trainer.strategy import HybridShardStrategy

KEY = re.compile(r'Parser key "([^"]+)"')
UNKNOWN = re.compile(r"(?:.*[Oo]ption '|unrecognized arguments: -*)([\w.+-]+)")
PARSER_ONLY = ("help", "print_shtab", "print_completion")
SPEC = ("class_path", "init_args", "dict_kwargs")
NO_VALUE = re.compile(r"argument --([\w.]+)\S*: expected one argument")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
VALUE = re.compile(r"(?:Got|Given) value: (.+)")
CLASS = (  # the parser says so of a class that it cannot use: its path, and why
    re.compile(r"given class_path '(?P<path>[^']+)':\s+(?P<why>.+)"),
    re.compile(r"callable class: (?P<why>.+?)\. Got value: (\w+\(class_path=')?(?P<path>[\w./]+)"),
    re.compile(r"(?P<why>Multiple subclasses with name (?P<path>\w+)\..+)"),
    re.compile(r"Import path (?P<path>\S+) does not correspond to (?P<why>a subclass of \w+)"),
)
NO_PATH = re.compile(r"(?:Unexpected import path format|Expected a dot import path string): (\S+)")
WORDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping",
    list: "a list", types.NoneType: "null", Path: "a path", Any: "a mapping",
}  # fmt: skip


class RefusalError(argparse.ArgumentError, LightningShardError):
    """A refusal of a parser, with the innermost parser that refused, its text and its key."""

    def __init__(self, text: str, parser: "Parser", inner: str, key: str) -> None:
        super().__init__(None, text)
        self.text, self.parser, self.inner, self.key = flat(text), parser, inner, key


class Parser(LightningArgumentParser):
    """A parser that raises its refusals, and keeps those of the parsers inside it."""

    refusals: ClassVar[list[RefusalError]] = []

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a RefusalError; the message contains that of the parser which refused first."""
        text = flat(message)
        known = [refusal for refusal in self.refusals if refusal.text in text]
        refusal = RefusalError(message, self, message, "")
        if known:
            inner = max(known, key=lambda refusal: len(refusal.text))
            outer = KEY.match(message) if inner.text != text else None
            key = f"{outer[1]}.{inner.key}".rstrip(".") if outer else inner.key
            refusal = RefusalError(message, inner.parser, inner.inner, key)
        self.refusals.append(refusal)
        raise refusal from ex

    @property
    def names(self) -> list[str]:
        """The dotted names of the options."""
        return [name for name in option_types(self) if name not in PARSER_ONLY]


def explain(refusal: RefusalError, given: Given, command: str, parser: Parser) -> UsageError:
    """Turn a refusal into one sentence.

    Args:
        refusal: The error of the whole command line's parser.
        given: The options that the user wrote.
        command: The subcommand.
        parser: The parser of the subcommand.
    """
    text, key = refusal.inner, refusal.key
    inside = refusal.parser if key else parser
    hint = f"all options: python -m lightning_shard {command} --help all"
    if found := UNKNOWN.match(text):
        name, choices = _unknown(found[1], inside)
        option = _option(given, key, name, refusal)
        strategy = (f"trainer.strategy.{n}" for n in HybridShardStrategy.__init__.__annotations__)
        elsewhere = (*parser.names, *strategy, *(bare(o.key) for o in given.options))
        below = [other for other in elsewhere if other.endswith(f".{name}") and not key]
        if key and not choices:  # the class takes no options
            named = given.last(f"{key}.class_path")
            if named is None:
                return UsageError(f"the option '{key}.class_path' is missing {given.place(key)}")
            if not inspect.isclass(locate(named.text)):
                return _class(named, named.text, "it is not a class", [], given)
        leaf = name.rpartition(".")[2]
        close = nearest(leaf, SPEC, "") or nearest(leaf, choices)
        close = f"; did you mean '{below[0]}'?" if below else close
        return UsageError(f"unknown option '{option.key}' {option.where}{close}", hint)
    if found := NO_VALUE.search(text):
        return UsageError(f"the option '{found[1]}' has no value {COMMAND_LINE}")
    if found := REQUIRED.search(text):
        return _missing(found[1].replace(f"{command}.", "").split(", "), given, key)
    if found := KEY.match(text):
        value = VALUE.search(text)
        option = _option(given, key, found[1], refusal, value[1] if value else "")
        for below in given.options:
            owner, _, leaf = below.key.rpartition(".")
            if owner == option.key and leaf not in SPEC and (close := nearest(leaf, SPEC[:1], "")):
                return UsageError(f"unknown option '{below.key}' {below.where}{close}", hint)
        return _value(option, option_types(inside).get(found[1]) or Any, text, given)
    return UsageError(flat(text), "; ".join(given.mentioned(text)))  # as another version says it


def flat(text: str) -> str:
    """Join a text to one line, since outer parsers indent the text of inner ones."""
    return " ".join(text.split())


def _option(given: Given, key: str, name: str, refusal: RefusalError, text: str = "") -> Option:
    """Find an option as the user wrote it."""
    path = f"{key}.{name}".lstrip(".")
    classes = re.findall(r"class_path[ =]'([^']+)'", refusal.text.partition(flat(refusal.inner))[0])
    of = classes[-1].rpartition(".")[2] if classes else ""
    return given.last(path, text, of) or Option(path, text, COMMAND_LINE)


def _unknown(name: str, parser: Parser) -> tuple[str, list[str]]:
    """Find the first part of a dotted name that a parser lacks, and the names that it has there."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        start = "".join(f"{part}." for part in parts[:depth])
        choices = {n.removeprefix(start).split(".")[0] for n in parser.names if n.startswith(start)}
        if part not in choices:
            return start + part, [*choices]
    return name, []


def _missing(names: list[str], given: Given, key: str) -> UsageError:
    if key:
        place = given.place(f"{key}.class_path") or given.place(key)
        option = f"{key}.init_args.{names[0]}"
        return UsageError(f"the option '{option}' is missing: the class needs it ({place})")
    name = "model" if "model" in names else names[0]
    base = {"model": "LightningModule", "data": "LightningDataModule"}.get(name, "value")
    place = f" ({place})" if (place := given.place(name)) else ""
    return UsageError(
        f"the option '{name}' is missing{place}: it names the {base}; "
        f"give --{name} ClassName, or a config file with '{name}: class_path:'"
    )


def _value(option: Option, hint: Any, text: str, given: Given) -> UsageError:
    classes, choices = classes_of(hint), literals(hint)
    for named in given.options if classes else ():
        is_class = named.key == option.key or named.key.endswith("class_path")
        if is_class and named.key.startswith(option.key) and (why := _import_problem(named.text)):
            return _class(named, named.text, why, [], given)
    for pattern in CLASS:
        if found := pattern.search(text):
            return _class(option, found["path"], found["why"], classes, given)
    only_classes = classes and not choices and not {int, float} & {*flatten(hint)}
    if only_classes and (found := NO_PATH.search(text)):
        why = "name it as an import does, such as my_package.MyModule" if "/" in text else ""
        return _class(option, found[1].rstrip("."), why, classes, given)
    close = nearest(option.text, choices, "")
    value = option.text or (VALUE.search(text) or [""])[0].partition(": ")[2]
    hint_ = "a mapping needs a space after each colon" if re.match(r"\{\w+:\S", value) else ""
    sentence = f"{option.key} must be {describe(hint)}; got '{value}' {option.where}{close}"
    return UsageError(sentence, hint_)


def _class(option: Option, path: str, why: str, bases: list[type], given: Given) -> UsageError:
    _, needs, package = why.partition("needs the package ")
    if needs:  # a workload of this package lacks an extra
        return UsageError(f"{option.key} {option.where}: {path} {needs}{package.rstrip('.')}")
    import_short_names()
    module, _, name = path.rpartition(".")
    known = {cls.__name__ for base in bases for cls in _family(base)}
    if module:
        with suppress(Exception):  # said in `why`
            known &= {*dir(importlib.import_module(module))}
    for named in given.options:
        if named.text == path and bare(named.key).startswith(bare(option.key)):
            option = named
    why = re.sub(r"^a subclass|^Expected '.*' to be a subclass", "it is not a subclass", why)
    why = f": {why}".replace("<class '", "").replace("'>.", "") if why else ""
    close = nearest(name, known) if name not in known and "/" not in path else ""
    return UsageError(f"unknown class '{path}' for {option.key} {option.where}{why}{close}")


def _import_problem(path: str) -> str:
    """Return why the module of a class fails while it is imported; "" if it does not."""
    module = path.rpartition(".")[0]
    if not re.fullmatch(r"[\w.]*\w", module):
        return ""
    try:
        importlib.import_module(module)
    except Exception as err:
        if isinstance(err, ModuleNotFoundError) and f"{module}.".startswith(f"{err.name}."):
            return ""  # the parser says that there is no such module
        return f"importing '{module}' failed: {type(err).__name__}: {err}"
    return ""


def describe(hint: Any) -> str:
    """Put a type hint into words."""
    choices = literals(hint)
    parts = [part for part in flatten(hint) if get_origin(part) is not Literal]
    if {int, float} & {*parts}:
        parts = [part for part in parts if not classes_of(part)]
    words = [_word(part) for part in parts]
    if choices:
        words.insert(0, "one of " + ", ".join(choices) if len(choices) > 1 else choices[0])
    return " or ".join(sorted(dict.fromkeys(words), key="null".__eq__))


def literals(hint: Any) -> list[str]:
    """Return the words that a type hint lists."""
    listed = (get_args(part) for part in flatten(hint) if get_origin(part) is Literal)
    return list(dict.fromkeys(str(value) for values in listed for value in values))


def flatten(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, nested ones too."""
    inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    for part in inner:
        yield from flatten(part)
    if not inner:
        yield hint


def classes_of(hint: Any) -> list[type]:
    """Return the classes that a hint accepts, or that the callables which it accepts return."""
    found: list[type] = []
    for part in flatten(hint):
        kind, inner = get_origin(part), get_args(part)
        if isinstance(part, type) and part not in WORDS and kind is None:
            found.append(part)
        elif kind in (list, tuple, Iterable, Callable) and inner:
            found += classes_of(inner[-1])
    return found


def _word(part: Any) -> str:
    kind, inner = get_origin(part), get_args(part)
    if kind in (list, tuple, Sequence) and inner:
        return f"a list of {_word(inner[0]).removeprefix('an ').removeprefix('a ')}s"
    if classes := classes_of(part):
        return f"the class_path of a {classes[0].__name__}"
    return WORDS.get(kind or part, str(part))


def _family(base: type) -> Iterator[type]:
    yield base
    for child in type.__subclasses__(base):
        if not child.__name__.startswith("_"):
            yield from _family(child)


def import_short_names(words: Iterable[str] | None = None) -> None:
    """Import classes of the workloads, which then need no module: those in `words`, or all."""
    if importlib.util.find_spec(WORKLOADS):
        workloads = importlib.import_module(WORKLOADS)
        for name in dir(workloads) if words is None else {*dir(workloads)} & {*words}:
            with suppress(ModuleNotFoundError):  # said where the class is used
                getattr(workloads, name)
