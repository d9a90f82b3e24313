"""All errors of the package have one base, and are errors of Python's own kinds."""

import importlib
import inspect
import pkgutil

import pytest

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError


def test_each_error_class_of_the_package_has_the_one_base() -> None:
    found: list[type] = []
    for info in pkgutil.walk_packages(lightning_shard.__path__, "lightning_shard."):
        if not info.name.endswith("__main__"):
            for value in vars(importlib.import_module(info.name)).values():
                own = inspect.isclass(value) and value.__module__ == info.name
                if own and issubclass(value, Exception):
                    found.append(value)
    assert len(found) > 7
    assert not [c for c in found if not issubclass(c, lightning_shard.LightningShardError)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("UnsupportedOperationError", NotImplementedError),
        ("DisagreementError", ValueError),
        ("StuckError", RuntimeError),
        ("UnsafeFileError", ValueError),
    ],
)
def test_each_public_error_is_one_of_pythons_too(name: str, kind: type) -> None:
    assert issubclass(getattr(lightning_shard, name), kind)


def test_an_error_is_caught_by_the_base() -> None:
    with pytest.raises(lightning_shard.LightningShardError, match="conv"):
        raise UnsupportedOperationError("conv")
