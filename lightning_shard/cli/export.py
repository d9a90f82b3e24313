"""`python -m lightning_shard export CKPT OUT`: a checkpoint as one file for other programs.

The end of OUT chooses what is written: `.safetensors` and `.pt`, `.pth` or `.bin` the weights,
`.ckpt` all of it, as a Lightning checkpoint that loads without this package.
"""

import argparse
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_shard.checkpoint.atomic import written_file
from lightning_shard.checkpoint.open import Opened, open_checkpoint, weights, with_integer_keys
from lightning_shard.checkpoint.safetensors_file import in_order, write_safetensors
from lightning_shard.checkpoint.stored import StoredState, StoredTensor, bytes_of
from lightning_shard.cli.usage import UsageError, as_usage_error, nearest


def export(options: argparse.Namespace) -> None:
    """Write a checkpoint as one file.

    Raises:
        UsageError: The checkpoint is of no known kind or not whole, or nothing can be written.
    """
    with as_usage_error(ValueError, FileNotFoundError):
        opened = open_checkpoint(options.checkpoint, trusted=options.trusted)
    if opened.problem:
        raise UsageError(f"'{options.checkpoint}' is incomplete: {opened.problem}")
    if options.strip:
        opened.content["state_dict"] = _without_prefix(weights(opened), options.strip)
    try:
        with as_usage_error(ValueError), written_file(options.out) as file:
            _write(opened, options.out, file)
    except OSError as err:
        raise UsageError(err.strerror or str(err)) from err
    except (RuntimeError, TypeError) as err:  # torch's, of tensors that the format cannot hold
        why = str(err).partition("\n")[0]
        raise UsageError(f"'{options.out}' cannot be written: {why}") from err
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


def _without_prefix(named: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Rename weights whose names begin with `prefix`, as a module's only network does."""
    if not any(name.startswith(prefix) for name in named):
        firsts = (name.partition(".")[0] + "." for name in named if "." in name)
        raise UsageError(f"no weight's name begins with '{prefix}'{nearest(prefix, firsts)}")
    found = {name.removeprefix(prefix): value for name, value in named.items()}
    if len(found) < len(named):
        raise UsageError(f"without '{prefix}' two weights would have one name")
    return found


def _write(opened: Opened, out: Path, file: IO[bytes]) -> None:
    """Write the kind of file that the end of `out` chooses, in which all parts are read."""
    content: dict[str, Any] = weights(opened)
    if out.suffix == ".ckpt":
        content = dict(opened.content)
        states = content.get("optimizer_states", [])
        content |= {"optimizer_states": [with_integer_keys(s) for s in states]} if states else {}
    if out.suffix == ".safetensors":
        content = {k: v for k, v in content.items() if isinstance(v, Tensor | StoredTensor)}
    bar: tqdm[Any] = tqdm(total=bytes_of(content), unit="B", unit_scale=True, desc="reading")
    with bar:
        if out.suffix != ".safetensors":
            torch.save(_read(content, bar), file)
            return
        shapes = {name: tensor.shape for name, tensor in content.items()}
        dtypes = {name: tensor.dtype for name, tensor in content.items()}
        parts = (_read(content[name], bar) for name in in_order(content, dtypes))
        write_safetensors(file, shapes, dtypes, parts)


def _read(value: Any, bar: "tqdm[Any]") -> Any:
    """Read nested tensors, and move the bar of bytes on."""
    if isinstance(value, Tensor | StoredTensor):
        whole = value.whole() if isinstance(value, StoredTensor) else value
        bar.update(whole.numel() * whole.element_size())
        return whole
    if isinstance(value, StoredState):
        value = value.stored
    if isinstance(value, dict):
        return {key: _read(v, bar) for key, v in value.items()}
    return type(value)(_read(v, bar) for v in value) if type(value) in (list, tuple) else value
