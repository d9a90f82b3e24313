"""Values of options that nobody gave: defaults of the class that was chosen, or a checkpoint's.

What is typed or stands in a config wins, and a note says where the checkpoint differs. Where an
option takes a class or a function, the parser imports and calls what a text names. A checkpoint may
come from a stranger, so it gives numbers, and texts only where nothing but a text can be meant.
"""

import inspect
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pydoc import locate
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from lightning_shard.cli.messages import SPEC
from lightning_shard.cli.positions import Given
from lightning_shard.cli.usage import UsageError
from lightning_shard.trainer.host import option_types

NUMBERS = (bool, int, float, types.NoneType)
CONTAINERS = (list, tuple, set, dict, Sequence, Iterable, Mapping, Union, types.UnionType)
ANYTHING = (Any, object, list, tuple, dict)
WORD = r"[\w -]*"  # neither the path of a class, nor YAML
VALUES = (*NUMBERS, str, list, tuple)
Stored = Mapping[str, Any]


def fill_in(spec: Any, given: Given, key: str, stored: Stored | None = None) -> Iterator[str]:
    """Change the options of a class that nobody gave, in place.

    After AdamW, `--model.optimizer SGD` would train with AdamW's weight_decay of 0.01: the parser
    keeps the values of the former class where both have an argument (jsonargparse 4.53).

    Args:
        spec: The resolved options, with the class's path.
        given: The options that the user wrote.
        key: The dotted key of `spec`.
        stored: The hyperparameters of the class in a checkpoint.

    Yields:
        A sentence for each option whose value in the checkpoint is another one.
    """
    if not isinstance(spec, Namespace) or "class_path" not in spec:
        return
    flat = dict(stored or {})
    for part in SPEC[1:]:
        flat |= inner if isinstance(inner := flat.pop(part, None), dict) else {}
    made: Any = locate(spec.class_path)
    values, own = spec.get("init_args") or Namespace(), inspect.signature(made).parameters
    for name, value in vars(values).items():
        option = f"{key}.{name}"
        if name in own and key in given and option not in given:
            default = own[name].default
            value = values[name] = default if isinstance(default, VALUES) else value
        then = flat.get(name, value)
        path = then.get("class_path", "") if isinstance(then, Mapping) else None
        if isinstance(value, Namespace) and (then is value or path == value.get("class_path")):
            yield from fill_in(value, given, option, then if path else None)
        elif then is value or _shown(then) == _shown(value):
            continue
        elif option not in given and _serves(then, made, name):
            values[name] = then
            yield f"{option} is {_shown(then):.80} as in ckpt_path; by default it is {value!r:.80}"
        else:
            words = f"{option} is {_shown(value):.80}, but was {_shown(then):.80} where"
            yield f"{words} ckpt_path was saved"
    if flat and inspect.Parameter.VAR_KEYWORD in (parameter.kind for parameter in own.values()):
        names = {name for name in flat if isinstance(name, str) and name[:1] != "_"}
        more = {n: flat[n] for n in names.difference(vars(values), SPEC) if _is_value(flat[n], Any)}
        spec["dict_kwargs"] = {**more, **(spec.get("dict_kwargs") or {})}


def check_model(model: Namespace, stored: Stored, path: str) -> None:
    """Raise a UsageError if another model than that of the configuration saved a checkpoint."""
    saved_by = stored.get("_class_path", stored.get("class_path", model.class_path))
    if str(saved_by).rpartition(".")[2] != model.class_path.rpartition(".")[2]:
        raise UsageError(
            f"'{path}' was saved by the model {saved_by!r}, but the configuration names "
            f"{model.class_path}; give the configuration of that run"
        )


def _serves(value: Any, made: Any, name: str) -> bool:
    """Return whether an argument of a class or function may take a value from a file."""
    parser: Any = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(made) else parser.add_function_arguments
    add(made, fail_untyped=False, sub_configs=True)
    with suppress(Exception):  # whatever the parser raises for a value of another type
        if is_value := _is_value(value, option_types(parser).get(name)):
            parser.validate(Namespace({name: value}), skip_required=True)
        return is_value
    return False


def _is_value(value: Any, hint: Any) -> bool:
    """Return whether a value chooses nothing but itself where this type is expected."""
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
    """Yield the types in a hint, without literals, of which no class is made."""
    if get_origin(hint) in CONTAINERS:
        for part in get_args(hint):
            yield from _members(part)
    elif get_origin(hint) is not Literal:
        yield hint


def _shown(value: Any) -> str:
    """Return a value in words, as YAML has it; a class is its path."""
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return value.get("class_path") or {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, os.PathLike) else value
