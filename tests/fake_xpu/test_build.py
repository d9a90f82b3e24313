"""A machine that cannot compile the fake device says what it lacks; the tests of it are skipped."""

import pytest

from tests.fake_xpu.build import CannotBuildError, library


@pytest.mark.parametrize("compiler", ["", "/no/such/compiler"])
def test_without_a_compiler(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CannotBuildError, match=r"needs a C\+\+ compiler; install g\+\+"):
        library()
