"""`@pytest.mark.spmd(n)`: the test body runs on each rank of a pool of n gloo processes."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests import pool


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("spmd")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    kwargs: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    pool.pool_of(*marker.args).run(pyfuncitem.obj, kwargs)
    return True


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heard here and in what is started: the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_unconfigure() -> None:
    pool.close_all()
