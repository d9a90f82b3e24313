"""`python -m lightning_shard export CKPT OUT`: a checkpoint as one file for other programs.

The end of OUT chooses what is written: `.safetensors` and `.pt`, `.pth` or `.bin` the weights,
`.ckpt` all of it, as a Lightning checkpoint that loads without this package.
"""

import argparse
from typing import Any

from tqdm import tqdm

from lightning_shard.checkpoint.one_file import content_for, write_content
from lightning_shard.checkpoint.open import open_checkpoint, weights
from lightning_shard.checkpoint.stored import bytes_of
from lightning_shard.cli.usage import UsageError, as_usage_error
from lightning_shard.data.atomic import written_file
from lightning_shard.processes.nearest import nearest


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
        content = content_for(options.out, opened)
        bar: tqdm[Any] = tqdm(total=bytes_of(content), unit="B", unit_scale=True, desc="reading")
        out = options.out.resolve()  # a symbolic link stays one
        with as_usage_error(ValueError), written_file(out) as file, bar:
            write_content(content, options.out, file, bar.update)
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
