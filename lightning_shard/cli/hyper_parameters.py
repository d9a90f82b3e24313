"""What the hyperparameters in a checkpoint may choose: values, never what is imported or called.

The parser builds any class and calls any function whose path it is given. So a path in a file of a
stranger would run commands. Here each hyperparameter is compared with the user's own configuration:
a number may differ from it, a text may differ where no class or function can be meant, and the path
of a class or function must be the one that the configuration names.
"""

import inspect
import types
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin

import torch
import yaml
from torch import Tensor

from lightning_shard.checkpoint.directory import REST
from lightning_shard.checkpoint.torch_file import read_torch_file
from lightning_shard.cli.names import find_class, flatten, parameters
from lightning_shard.cli.usage import UsageError, as_usage_error

CLASS, CLASS_PATH = "_class_path", "class_path"
SPEC = frozenset((CLASS, CLASS_PATH, "init_args", "dict_kwargs"))
DEEPEST = 32  # levels of nested values; a pickle can hold a list that contains itself
NUMBERS = (bool, int, float, complex, bytes, Tensor, torch.dtype, torch.device, types.NoneType)
SEQUENCES = (list, tuple, set, frozenset)
CONTAINERS = (*SEQUENCES, dict, Iterable, Sequence, Mapping)
ANYTHING = (Any, object, inspect.Parameter.empty)


def hyperparameters(path: str | None, *, trusted: bool) -> Any:
    """The hyperparameters in a checkpoint; None if it holds none that can be read without its code.

    Args:
        path: The option ckpt_path.
        trusted: Whether weights_only is false; then hyperparameters that are objects are left out.

    Raises:
        UsageError: The file cannot be read.
    """
    file = Path(path or "")
    file = file / REST if file.is_dir() else file
    if not zipfile.is_zipfile(file):
        return None  # of "last" and "best", or of another format, which holds weights alone
    loaded: Any = None
    with suppress(ValueError) if trusted else as_usage_error(ValueError):
        loaded = read_torch_file(file, only="data.pkl")
    return loaded.get("hyper_parameters") if isinstance(loaded, dict) else None


def chosen(given: Mapping[str, Any], stored: Any, origin: str) -> dict[str, Any]:
    """The user's options of the model, with the values that a checkpoint holds instead of theirs.

    Args:
        given: `class_path`, `init_args` and `dict_kwargs` of the model in the configuration.
        stored: `hyper_parameters` of the checkpoint.
        origin: The checkpoint, for messages.

    Returns:
        Options like `given`.

    Raises:
        UsageError: The checkpoint chooses a class or a function, or is of another model.
    """
    try:
        return _of_model(given, stored)
    except UsageError as err:
        raise UsageError(f"the hyperparameters in '{origin}' {err}") from err


def _of_model(given: Mapping[str, Any], stored: Any) -> dict[str, Any]:
    if not isinstance(stored, Mapping) or not all(isinstance(name, str) for name in stored):
        raise UsageError("are no mapping of names to values")
    own = {name: value for name, value in stored.items() if name != "_instantiator"}
    path = own.pop(CLASS, None)
    if path is None and CLASS_PATH in own:
        path, own = own[CLASS_PATH], _flat(own)
    if path is not None and not _is_path_of(path, given[CLASS_PATH]):
        raise UsageError(
            f"are those of the model {path!r}, but the configuration names "
            f"{given[CLASS_PATH]}; give the configuration of the run that saved it"
        )
    return _merged(given, own, "model")


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in spec.items() if name not in SPEC}
    for key in ("init_args", "dict_kwargs"):
        part = spec.get(key) or {}
        if not isinstance(part, Mapping):
            raise UsageError(f"have no mapping under '{key}'")
        flat |= part
    return flat


def _is_path_of(path: Any, given: str) -> bool:
    """Whether a path in a file means the class of the configuration, which may have moved since."""
    return isinstance(path, str) and path.rpartition(".")[2] == given.rpartition(".")[2]


def _merged(given: Mapping[str, Any], stored: Mapping[str, Any], key: str) -> dict[str, Any]:
    cls = find_class(given[CLASS_PATH], [])[0]
    hints = parameters(cls) if cls else {}
    own = inspect.signature(cls).parameters if cls else {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    init = dict(given.get("init_args") or {})
    more = dict(given.get("dict_kwargs") or {})
    for name, value in stored.items():
        known = init if name in init or name in hints else more
        if name in known and _same(known[name], value):
            continue
        if known is more and not takes_any:
            raise UsageError(f"have '{name}', which {given[CLASS_PATH]} does not take")
        hint = hints.get(name, inspect.Parameter.empty)
        if hint is inspect.Parameter.empty and name in own and callable(own[name].default):
            hint = Callable  # without a hint it may take a function by its path
        known[name] = _value(known.get(name), value, hint, f"{key}.{name}")
    merged = {CLASS_PATH: given[CLASS_PATH], "init_args": init}
    return merged | ({"dict_kwargs": more} if more else {})


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        return given.keys() == value.keys() and all(_same(given[k], value[k]) for k in given)
    if isinstance(given, list | tuple) and isinstance(value, list | tuple):
        return len(given) == len(value) and all(map(_same, given, value))
    return type(given) is type(value) and not isinstance(given, Tensor) and given == value


def _value(given: Any, value: Any, hint: Any, key: str) -> Any:
    """`value` if it chooses nothing but values; of the class that `given` names, its options."""
    spec = isinstance(value, Mapping) and CLASS_PATH in value
    if spec and isinstance(given, Mapping) and given.get(CLASS_PATH) == value[CLASS_PATH]:
        return _merged(given, _flat(value), key)
    if problem := _problem(value, hint):
        raise UsageError(
            f"choose {problem} for {key}, but a checkpoint may choose values only; name it in your "
            "configuration if you want it"
        )
    return value


def _problem(value: Any, hint: Any, depth: int = 0) -> str:
    """What in `value` could name a class or a function, or is no value at all; empty if nothing."""
    if depth > DEEPEST:
        return f"values nested more than {DEEPEST} levels deep"
    if isinstance(value, NUMBERS):
        return ""
    if isinstance(value, str):
        return "" if _is_text(value, hint) else repr(value)
    if isinstance(value, Mapping):
        if SPEC & set(value):
            return repr(value.get(CLASS_PATH, value.get(CLASS, "the options of a class")))
        value = [*value, *value.values()]
    elif not isinstance(value, SEQUENCES):
        return f"a {type(value).__name__}"
    return next(filter(None, (_problem(item, hint, depth + 1) for item in value)), "")


def _is_text(value: str, hint: Any) -> bool:
    parts = list(flatten(hint))
    if all(part is str or part is types.NoneType or get_origin(part) is Literal for part in parts):
        return True
    if not all(map(_is_plain, parts)) or CLASS_PATH in value:
        return False
    try:  # the parser reads a text as YAML where anything is accepted
        return not isinstance(yaml.safe_load(value), dict | list)
    except yaml.YAMLError:
        return True
    except (RecursionError, ValueError):
        return False


def _is_plain(hint: Any) -> bool:
    """Whether no class or function can be given where this type is expected."""
    origin, inner = get_origin(hint), [part for arg in get_args(hint) for part in flatten(arg)]
    if hint is Ellipsis or hint in ANYTHING or hint in (*NUMBERS, str) or origin is Literal:
        return True
    if (origin or hint) in CONTAINERS:
        return all(map(_is_plain, inner))
    return isinstance(hint, type) and issubclass(hint, Enum | PurePath)
