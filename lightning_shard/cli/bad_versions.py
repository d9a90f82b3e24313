"""Lists versions of packages that are malicious or have a known hole, with their advisories."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class BadVersions:
    """Versions of a package that `doctor` warns of.

    Attributes:
        package: The name of the package in registries.
        versions: The versions, as a specifier of PEP 440.
        advisory: The advisory, at github.com/advisories.
        what: A sentence that says what is wrong, and what to do.
    """

    package: str
    versions: str
    advisory: str
    what: str


_STEALS = (
    "is malicious: on import it sends the credentials that it finds to a stranger; remove it, and "
    "replace every password, key and token that this machine could read"
)
_RUNS = (
    "runs code that a hyperparameter of a checkpoint names when the checkpoint is loaded; install "
    "2.6.6 or later, and load no checkpoint of a stranger until then"
)
BAD_VERSIONS = (
    BadVersions("lightning", "==2.6.2", "GHSA-w37p-236h-pfx3", _STEALS),
    BadVersions("lightning", "==2.6.3", "GHSA-w37p-236h-pfx3", _STEALS),
    BadVersions("lightning", "<2.6.6", "GHSA-qqmf-gpg7-g8gw", _RUNS),
    BadVersions("pytorch-lightning", "<2.6.6", "GHSA-qqmf-gpg7-g8gw", _RUNS),
)


def warnings_of_versions(
    version: Callable[[str], str] = importlib.metadata.version,
) -> list[str]:
    """Return a sentence for each row of the table that fits an installed package.

    Args:
        version: Returns the version of a package, which is not imported.
    """
    found: list[str] = []
    for row in BAD_VERSIONS:
        try:
            installed = version(row.package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if SpecifierSet(row.versions).contains(installed, prereleases=True):
            found.append(f"{row.package} {installed} {row.what} ({row.advisory})")
    return found
