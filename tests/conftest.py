"""`@pytest.mark.spmd(n)`: the test body runs on each rank of a pool of n gloo processes."""

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


def pytest_unconfigure() -> None:
    pool.close_all()
