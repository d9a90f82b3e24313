"""`python -m lightning_shard inspect CKPT`: what is in a checkpoint, and whether it is whole."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.errors import DamagedError
from lightning_shard.checkpoint.foreign import OWN
from lightning_shard.checkpoint.open import Opened, open_checkpoint, weights
from lightning_shard.checkpoint.stored import StoredTensor, bytes_of
from lightning_shard.cli.usage import as_usage_error, labelled, printable


def inspect(options: argparse.Namespace) -> None:
    """Print the content of a checkpoint, and exit with 1 if it is not whole.

    Raises:
        UsageError: The checkpoint cannot be read.
    """
    with as_usage_error(ValueError, FileNotFoundError):
        try:
            opened = open_checkpoint(options.checkpoint, trusted=options.trusted)
        except DamagedError as err:
            print(printable(labelled("complete", f"no: {err}".rstrip("."))))
            sys.exit(1)
    print("\n".join(map(printable, described(opened))))
    if opened.problem:
        sys.exit(1)


def described(opened: Opened) -> Iterator[str]:
    """Describe a checkpoint in lines for a terminal."""
    content, manifest = opened.content, opened.manifest
    yield labelled("kind", opened.kind)
    files = manifest.get("files")
    whole = f"yes, the hashes of {len(files)} files are right" if files else "yes"
    yield labelled("complete", f"no: {opened.problem}" if opened.problem else whole)
    own = content.get(OWN, manifest)
    for key in ("epoch", "global_step"):
        if key in {**manifest, **content}:
            yield labelled(key, {**manifest, **content}[key])
    if "mesh" in own:
        yield labelled("mesh", ", ".join(f"{name} {n}" for name, n in own["mesh"].items()))
    versions = dict(own.get("versions", {}))
    if "pytorch-lightning_version" in content:
        versions["lightning"] = content["pytorch-lightning_version"]
    if versions:
        yield labelled("versions", ", ".join(f"{name} {v}" for name, v in versions.items()))
    hyper_parameters = content.get("hyper_parameters", manifest.get("hyper_parameters", {}))
    if hyper_parameters:
        yield "hyperparameters"
        yield from (f"  {name}: {value!r}" for name, value in hyper_parameters.items())
    if "state_dict" in content:
        yield from _weights(weights(opened))
    for number, state in enumerate(content.get("optimizer_states", [])):
        yield from _optimizer(number, state)
    known = {"state_dict", "optimizer_states", "hyper_parameters", "epoch", "global_step", OWN}
    others = [key for key in content if key not in known and not key.startswith("pytorch-l")]
    if others:
        yield labelled("also", ", ".join(map(str, others)))


def _weights(state: Mapping[str, Any]) -> Iterator[str]:
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor | StoredTensor)}
    numbers = sum(v.shape.numel() for v in tensors.values())
    yield labelled(
        "weights", f"{len(tensors)} tensors, {numbers:,} numbers, {bytes_of(tensors):,} bytes"
    )
    widest = max(map(len, tensors), default=0)
    for name, v in tensors.items():
        shape = " x ".join(map(str, v.shape)) or "scalar"
        dtype = str(v.dtype).removeprefix("torch.")
        yield f"  {name:<{widest}}  {shape}  {dtype}  {bytes_of(v):,} bytes"


def _optimizer(number: int, state: Mapping[str, Any]) -> Iterator[str]:
    entries = list(state["state"].values())
    kinds = sorted({str(key) for entry in entries for key in entry})
    what = f"{', '.join(kinds) or 'no state'} of {len(entries)} parameters"
    yield labelled(f"optimizer {number}", f"{what}, {bytes_of(entries):,} bytes")
    for group in state["param_groups"]:
        settings = ", ".join(f"{k} {v}" for k, v in group.items() if k != "params")
        yield f"  {len(group['params'])} parameters: {settings}"
