"""The configs that came with the package: `--config tfno_darcy` or `--config tutorials/t5`."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from lightning_shard.cli.usage import ENV_PREFIX, UsageError, nearest

WORKLOADS = "lightning_modules"  # the package whose classes and configs have short names
TUTORIALS = "tutorials"  # the folder whose configs are named with it


def named_configs() -> dict[str, Path]:
    """Find the configs that came with the package, by their bare names.

    They are in the wheel, or beside the package in a checkout.
    """
    spec = importlib.util.find_spec(WORKLOADS)
    for place in spec.submodule_search_locations or [] if spec else []:
        for here in (Path(place) / "configs", Path(place).parent / "configs"):
            if (here / "tfno_darcy.yaml").is_file():
                found = sorted([*here.glob("*.yaml"), *here.glob("overlays/*.yaml")])
                nested = {f"{TUTORIALS}/{p.stem}": p for p in here.glob(f"{TUTORIALS}/*.yaml")}
                return {path.stem: path for path in found} | nested
    return {}


def find_configs(words: Sequence[str]) -> list[str]:
    """Put paths in place of bare names of configs into the words of a command line.

    A bare name has neither a suffix nor a folder other than `tutorials`, and no file of the working
    directory has it.

    Raises:
        UsageError: No config of the package has the name.
    """
    found = list(words)
    for index, word in enumerate(found):
        option, equals, value = word.partition("=")
        if option in ("-c", "--config") and equals:
            found[index] = f"{option}={_path(value)}"
        elif word in ("-c", "--config") and index + 1 < len(found):
            found[index + 1] = _path(found[index + 1])
    for name, value in os.environ.items():
        if name.startswith(f"{ENV_PREFIX}_") and name.endswith("CONFIG") and value:
            os.environ[name] = _path(value)
    return found


def _path(name: str) -> str:
    bare = name.removeprefix(f"{TUTORIALS}/") == Path(name).stem
    if Path(name).exists() or not bare:
        return name
    configs = named_configs()
    if name not in configs:
        close = nearest(name, configs, "the package has")
        raise UsageError(
            f"there is no file '{name}', and no config of this name came with the package{close}"
        )
    return str(configs[name])
