"""Packages that only some installations have: the plain install of lightning-shard lacks them."""

import importlib
from typing import Any


def optional(package: str, needed_by: str) -> Any:
    """Import a package, or say how to install it.

    Args:
        package: The name of the module to import.
        needed_by: What cannot work without it; it begins the sentence.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as err:
        raise not_installed(err, needed_by) from err


def not_installed(err: ModuleNotFoundError, needed_by: str) -> ModuleNotFoundError:
    """The same error, with the command that installs what is missing."""
    package = (err.name or "").partition(".")[0]
    return ModuleNotFoundError(
        f"{needed_by} needs the package '{package}', which is not installed; "
        "pip install 'lightning-shard[workloads]' installs it.",
        name=err.name,
    )
