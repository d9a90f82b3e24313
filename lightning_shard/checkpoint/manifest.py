"""The manifest of a checkpoint's directory: size and SHA-256 of each of its files, compared."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.errors import EARLIER, DamagedError, Kind, damage_named, inside
from lightning_shard.processes.narrow import is_dict

MANIFEST = "manifest.json"
FORMAT = "lightning_shard 1"
_KIND = Kind(f"no manifest of {FORMAT}", EARLIER)
READ = (".metadata", ".distcp", "meta.pt")  # the ends of the names of files that are read


def size_and_hash(path: Path) -> dict[str, Any]:
    """Return the entry of the file `path` in a manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest; None for a directory that another strategy wrote.

    Raises:
        DamagedError: It is not whole, or names files outside of the directory.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    with damage_named(f"'{path}'", _KIND):
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}")
        for name, entry in manifest["files"].items():
            inside(folder, name)
            int(entry["bytes"])
        for key in ("mesh", "versions", "hyper_parameters"):
            if not is_dict(manifest.get(key, {})):
                raise ValueError(f"{key} of another kind")
        return manifest


def problem_of(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Return why the directory is not whole, or None; each of several ranks reads its share."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for path in sorted(folder.iterdir()):  # others may lie there: nobody reads them
        if path.name.endswith(READ) and path.name not in manifest["files"]:
            return f"the manifest does not name '{path.name}'"
    problems = (
        problem_with(folder / name, entry, number % ranks == rank)
        for number, (name, entry) in enumerate(sorted(manifest["files"].items()))
    )
    return next(filter(None, problems), None)


def problem_with(path: Path, entry: Mapping[str, Any], with_hash: bool = True) -> str | None:
    """Return why a file is not the one that the manifest describes, or None."""
    if not path.is_file():
        return f"'{path.name}' is missing"
    if path.stat().st_size != entry.get("bytes"):
        return f"'{path.name}' has {path.stat().st_size} bytes instead of {entry.get('bytes')}"
    if not entry.get("sha256"):
        return f"the manifest has no hash of '{path.name}'"
    if with_hash and size_and_hash(path)["sha256"] != entry["sha256"]:
        return f"'{path.name}' is not what was written (its hash differs)"
    return None


def compared_with(folder: Path, manifest: Mapping[str, Any]) -> Callable[[Path], None]:
    """Return a function that compares a file of the directory with the manifest."""

    def compare(path: Path) -> None:
        name = path.relative_to(folder).as_posix()
        if problem := problem_with(path, manifest["files"].get(name, {"bytes": "no"})):
            raise DamagedError(f"'{folder}' is incomplete: {problem}; {EARLIER}.")

    return compare
