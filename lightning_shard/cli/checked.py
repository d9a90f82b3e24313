"""Keeps what `check` found in the output folder, for the report of a later `fit`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.cli.usage import is_mapping

FILE = "check.yaml"


def remember(folder: Any, options: Mapping[str, Any], shard_dims: Any, found: str) -> None:
    """Write what was found, if the config names an output folder.

    Args:
        folder: `trainer.default_root_dir`.
        options: The resolved options; those of the model and the data decide about a step.
        shard_dims: Of the strategy.
        found: What `check` printed.
    """
    if not folder or "://" in str(folder):
        return
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"found": f"On {when}:\n{found}", "of": _of(options, shard_dims)})
    (Path(folder) / FILE).write_text(text, encoding="utf-8")


def recall(folder: Any, options: Mapping[str, Any], shard_dims: Any) -> str:
    """What was found for the same model and data; nothing if something else was checked."""
    path = Path(folder or "") / FILE
    if not folder or not path.is_file():
        return ""
    try:
        kept = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError):
        return ""  # another program's file of this name
    if not is_mapping(kept) or kept.get("of") != _of(options, shard_dims):
        return ""
    return str(kept["found"])


def _of(options: Mapping[str, Any], shard_dims: Any) -> dict[str, str]:
    """As text, so that what YAML cannot hold alike, such as a tuple, is compared as well."""
    return {
        "model": str(options.get("model")),
        "data": str(options.get("data")),
        "shard_dims": str(shard_dims),
    }
