"""Packages that only some installations have: the plain install of lightning-shard lacks them."""

import importlib
from typing import Any


def optional(package: str, needed_by: str, extra: str = "workloads") -> Any:
    """Import a package, or say how to install it.

    Args:
        package: The name of the module to import.
        needed_by: The feature that cannot work without it; it begins the sentence.
        extra: The extra of this project that installs the package.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as err:
        raise not_installed(err, needed_by, extra) from err


def not_installed(
    err: ModuleNotFoundError, needed_by: str, extra: str = "workloads"
) -> ModuleNotFoundError:
    """Return the same error, with the command that installs the missing package."""
    package = (err.name or "").partition(".")[0]
    return ModuleNotFoundError(
        f"{needed_by} needs the package '{package}', which is not installed; "
        f"pip install 'lightning-shard[{extra}]' installs it.",
        name=err.name,
    )
