"""`python -m lightning_shard export CKPT OUT`: a checkpoint as one file for other programs.

The end of OUT chooses what is written: `.safetensors` and `.pt`, `.pth` or `.bin` the weights,
`.ckpt` all of it, as a Lightning checkpoint that loads without this package.
"""

import argparse
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_shard.checkpoint.safetensors_file import in_order, write_safetensors
from lightning_shard.checkpoint.stored import StoredState, StoredTensor, bytes_of
from lightning_shard.checkpoint.weights import Opened, open_checkpoint, weights, with_integer_keys
from lightning_shard.checkpoint.whole_files import written_file
from lightning_shard.cli.usage import UsageError, is_mapping, nearest, told_by_user

Read = Callable[[Any], Any]


def export(options: argparse.Namespace) -> None:
    """Write one file.

    Raises:
        UsageError: The checkpoint is of no known kind or not whole, or nothing can be written.
    """
    with told_by_user(ValueError, FileNotFoundError):
        opened = open_checkpoint(options.checkpoint, trusted=options.trusted)
    if opened.problem:
        raise UsageError(f"'{options.checkpoint}' is incomplete: {opened.problem}")
    if options.strip:
        opened.content["state_dict"] = _without_prefix(weights(opened), options.strip)
    try:
        with told_by_user(ValueError), written_file(options.out) as file:
            WRITERS[options.out.suffix](opened, file)  # which reads all parts of the checkpoint
    except OSError as err:
        raise UsageError(err.strerror or str(err)) from err
    except (RuntimeError, TypeError) as err:  # torch's, of tensors that the format cannot hold
        why = str(err).partition("\n")[0]
        raise UsageError(f"'{options.out}' cannot be written: {why}") from err
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


def _without_prefix(named: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Rename weights whose names begin with `prefix`, as those of the only network of a module."""
    if not any(name.startswith(prefix) for name in named):
        firsts = (name.partition(".")[0] + "." for name in named if "." in name)
        raise UsageError(f"no weight's name begins with '{prefix}'{nearest(prefix, firsts)}")
    found = {name.removeprefix(prefix): value for name, value in named.items()}
    if len(found) < len(named):
        raise UsageError(f"without '{prefix}' two weights would have one name")
    return found


def _reader(total: int) -> "tuple[tqdm[Any], Read]":
    """A progress bar of bytes, and a function that reads nested tensors and moves it on."""
    bar: tqdm[Any] = tqdm(total=total, unit="B", unit_scale=True, desc="reading")

    def read(value: Any) -> Any:
        if isinstance(value, Tensor | StoredTensor):
            whole = value.whole() if isinstance(value, StoredTensor) else value
            bar.update(whole.numel() * whole.element_size())
            return whole
        if isinstance(value, StoredState):
            value = value.stored
        if is_mapping(value):
            return {key: read(v) for key, v in value.items()}
        return type(value)(map(read, value)) if type(value) in (list, tuple) else value

    return bar, read


def _write_weights(opened: Opened, file: IO[bytes]) -> None:
    bar, read = _reader(bytes_of(weights(opened)))
    with bar:
        torch.save(read(weights(opened)), file)


def _write_safetensors(opened: Opened, file: IO[bytes]) -> None:
    tensors = {k: v for k, v in weights(opened).items() if isinstance(v, Tensor | StoredTensor)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    bar, read = _reader(bytes_of(tensors))
    with bar:
        values = (read(tensors[name]) for name in in_order(tensors, dtypes))
        write_safetensors(file, shapes, dtypes, values)


def _write_checkpoint(opened: Opened, file: IO[bytes]) -> None:
    content = dict(opened.content)
    if "optimizer_states" in content:
        content["optimizer_states"] = [with_integer_keys(s) for s in content["optimizer_states"]]
    bar, read = _reader(bytes_of(content))
    with bar:
        torch.save(read(content), file)


WRITERS: dict[str, Callable[[Opened, IO[bytes]], None]] = {
    ".safetensors": _write_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _write_weights),
    ".ckpt": _write_checkpoint,
}
