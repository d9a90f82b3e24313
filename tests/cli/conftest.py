"""Hundreds of parsers of the same classes: what the source of a class says is read once."""

import copy
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="package", autouse=True)
def signatures_are_read_once() -> Iterator[None]:
    """Half of the time of a parser is that of the syntax trees and docstrings of its classes."""
    from jsonargparse import _signatures  # the controller of the workers does without

    read = _signatures.get_signature_parameters

    @functools.cache
    def known(owner: Any, method: str | None) -> Any:
        return read(owner, method, logger=False)

    def parameters(owner: Any, method: str | None = None, logger: Any = True) -> Any:
        return [copy.copy(parameter) for parameter in known(owner, method)]

    with mock.patch.object(_signatures, "get_signature_parameters", parameters):
        yield
