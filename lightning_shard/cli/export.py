"""`python -m lightning_shard export CKPT OUT`: a checkpoint as one file for other programs.

The end of OUT chooses what is written: `.safetensors` and `.pt`, `.pth` or `.bin` the weights,
`.ckpt` all of it, as a Lightning checkpoint that loads without this package.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from lightning_shard.atomic import partial_of, put_in_place
from lightning_shard.cli.sources import UsageError
from lightning_shard.open_checkpoint import (
    Opened,
    open_checkpoint,
    weights,
    with_integer_keys,
)
from lightning_shard.stored import StoredState, StoredTensor, bytes_of

Read = Callable[[Any], Any]


def export(args: Sequence[str]) -> None:
    """Write one file.

    Raises:
        UsageError: The checkpoint or the file to write is of no known kind, or not whole.
    """
    parser = argparse.ArgumentParser("python -m lightning_shard export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a file, or a sharded directory")
    parser.add_argument("out", type=Path, help="*.safetensors, *.pt, *.pth, *.bin or *.ckpt")
    parser.add_argument("--trusted", action="store_true", help="build objects, which can run code")
    options = parser.parse_args(args)
    write = WRITERS.get(options.out.suffix)
    if write is None:
        raise UsageError(
            f"'{options.out}' ends with none of {', '.join(WRITERS)}, which choose what is written"
        )
    if options.out.resolve() == options.checkpoint.resolve():
        raise UsageError(f"'{options.out}' is the checkpoint itself; give another name")
    try:
        opened = open_checkpoint(options.checkpoint, trusted=options.trusted)
    except (ValueError, FileNotFoundError) as err:
        raise UsageError(str(err).rstrip(".")) from err
    if opened.problem:
        raise UsageError(f"'{options.checkpoint}' is incomplete: {opened.problem}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(options.out)
    try:
        write(opened, partial)
        put_in_place(partial, options.out)
    except OSError as err:
        raise UsageError(f"'{options.out}' cannot be written: {err}") from err
    finally:
        partial.unlink(missing_ok=True)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


def _reader(total: int) -> tuple[tqdm, Read]:
    """A progress bar of bytes, and a function that reads nested tensors and moves it on."""
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="reading")

    def read(value: Any) -> Any:
        if isinstance(value, Tensor | StoredTensor):
            whole = value.whole() if isinstance(value, StoredTensor) else value
            bar.update(whole.numel() * whole.element_size())
            return whole
        if isinstance(value, StoredState):
            value = value.stored
        if isinstance(value, dict):
            return {key: read(v) for key, v in value.items()}
        return type(value)(map(read, value)) if type(value) in (list, tuple) else value

    return bar, read


def _write_weights(opened: Opened, path: Path) -> None:
    bar, read = _reader(bytes_of(weights(opened)))
    with bar:
        torch.save(read(weights(opened)), path)


def _write_safetensors(opened: Opened, path: Path) -> None:
    tensors = {k: v for k, v in weights(opened).items() if isinstance(v, Tensor | StoredTensor)}
    pairs = [name for name, value in tensors.items() if value.dtype == torch.complex128]
    bar, read = _reader(bytes_of(tensors))
    with bar:
        whole = {
            name: torch.view_as_real(read(v)) if name in pairs else read(v)
            for name, v in tensors.items()
        }
        # tied weights share memory, which the format does not know; it has no complex128 either
        whole = {name: v.clone(memory_format=torch.contiguous_format) for name, v in whole.items()}
        save_file(whole, path, {"format": "pt", "complex": json.dumps(pairs)})


def _write_checkpoint(opened: Opened, path: Path) -> None:
    content = dict(opened.content)
    if "optimizer_states" in content:
        content["optimizer_states"] = [with_integer_keys(s) for s in content["optimizer_states"]]
    bar, read = _reader(bytes_of(content))
    with bar:
        torch.save(read(content), path)


WRITERS: dict[str, Callable[[Opened, Path], None]] = {
    ".safetensors": _write_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _write_weights),
    ".ckpt": _write_checkpoint,
}
