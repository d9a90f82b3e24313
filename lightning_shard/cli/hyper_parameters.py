"""Values of a checkpoint's hyperparameters, for options of the model that nobody gave.

What is typed or stands in a config wins, and a note says where the checkpoint differs. Where an
option takes a class or a function, the parser imports and calls what a text names. A checkpoint may
come from a stranger, so it gives numbers, and texts only where nothing but a text can be meant.
"""

import inspect
import re
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from lightning_shard.checkpoint.directory import REST
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.cli.messages import SPEC
from lightning_shard.cli.positions import Given
from lightning_shard.cli.usage import UsageError, as_usage_error

NUMBERS = (bool, int, float, types.NoneType)
CONTAINERS = (list, tuple, set, dict, Sequence, Iterable, Mapping, Union, types.UnionType)
ANYTHING = (Any, object, list, tuple, dict)
WORD = r"[\w -]*"  # neither the path of a class, nor YAML


def hyperparameters(path: str | None, *, trusted: bool) -> dict[str, Any]:
    """Return the hyperparameters in a checkpoint; none where it needs code to be read.

    Args:
        path: The option ckpt_path.
        trusted: Whether weights_only is false; then hyperparameters that are objects are left out.

    Raises:
        UsageError: The file cannot be read.
    """
    file = Path(path or "")
    file = file / REST if file.is_dir() else file
    loaded: Any = None
    if zipfile.is_zipfile(file):  # neither "last" nor another format, which holds weights alone
        with suppress(ValueError) if trusted else as_usage_error(ValueError):
            loaded = read_torch_file(file, only="data.pkl")
    found = loaded.get("hyper_parameters") if isinstance(loaded, dict) else None
    return found if isinstance(found, dict) else {}


def serve(model: Namespace, stored: Mapping[str, Any], given: Given, path: str) -> list[str]:
    """Put stored values into the options of the model that nobody gave, in place.

    Args:
        model: The resolved options of the model.
        stored: The hyperparameters in the checkpoint.
        given: What the user wrote.
        path: The checkpoint, for messages.

    Returns:
        A sentence for each option whose value differs.

    Raises:
        UsageError: The checkpoint was saved by another model.
    """
    saved_by = stored.get("_class_path", stored.get("class_path", model.class_path))
    if str(saved_by).rpartition(".")[2] != model.class_path.rpartition(".")[2]:
        raise UsageError(
            f"'{path}' was saved by the model {saved_by!r}, but the configuration names "
            f"{model.class_path}; give the configuration of that run"
        )
    return [*_serve(model, stored, given, "model")]


def _serve(spec: Namespace, stored: Mapping[str, Any], given: Given, key: str) -> Iterator[str]:
    parts = [part for name in SPEC[1:] if isinstance(part := stored.get(name), Mapping)]
    flat = {name: value for part in (stored, *parts) for name, value in part.items()}
    made: Any = locate(spec.class_path)
    hints, values = _hints(made), spec.get("init_args") or Namespace()
    for name, value in vars(values).items():
        option, then = f"{key}.{name}", flat.get(name, value)
        path = then.get("class_path") if isinstance(then, Mapping) else ""
        if isinstance(value, Namespace) and path == value.get("class_path"):
            yield from _serve(value, then, given, option)
        elif then is value or _text(then) == _text(value):
            continue
        elif option in given or not _is_value(then, hints.get(name)):
            yield f"{option} is {_shown(value)}, but was {_shown(then)} where ckpt_path was saved"
        else:
            values[name] = then
            yield f"{option} is {_shown(then)} as in ckpt_path; by default it is {_shown(value)}"
    kinds = [parameter.kind for parameter in inspect.signature(made).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        names = {name for name in flat if isinstance(name, str) and name[:1] != "_"}
        more = {n: flat[n] for n in names.difference(hints, SPEC) if _is_value(flat[n], Any)}
        spec["dict_kwargs"] = {**more, **(spec.get("dict_kwargs") or {})}


def _hints(made: Any) -> dict[str, Any]:
    """Return the type hints that the parser finds for the arguments of a class or function."""
    parser: Any = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(made) else parser.add_function_arguments
    add(made, fail_untyped=False, sub_configs=True)
    return {action.dest: getattr(action, "_typehint", None) for action in parser._actions}


def _is_value(value: Any, hint: Any) -> bool:
    """Whether a value chooses nothing but itself where this type is expected."""
    if isinstance(value, Mapping):
        return not {*SPEC} & {*value} and _is_value([*value, *value.values()], hint)
    if isinstance(value, list | tuple):
        return all(_is_value(item, hint) for item in value)
    if not isinstance(value, str):
        return isinstance(value, NUMBERS)
    others = [part for part in _members(hint) if part not in (*NUMBERS, str, ...)]
    is_word = re.fullmatch(WORD, value)
    return all(is_word and (part in ANYTHING or repr(part) == "Untyped") for part in others)


def _members(hint: Any) -> Iterator[Any]:
    """The types in a hint, without those of literals, of which no class is made."""
    kind = get_origin(hint)
    if kind in CONTAINERS:
        for part in get_args(hint):
            yield from _members(part)
    elif kind is not Literal:
        yield hint


def _text(value: Any) -> str:
    return repr([*value] if isinstance(value, tuple) else value)


def _shown(value: Any) -> str:
    """A value for a note; a class by its path."""
    path = value.get("class_path") if isinstance(value, Mapping | Namespace) else None
    return f"{value if path is None else path!r:.80}"
