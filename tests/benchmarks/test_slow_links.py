"""The benchmark on slow links: what it lacks in one sentence, and that it leaves nothing behind."""

import shutil
import subprocess
import sys
from unittest import mock

import pytest

from benchmarks import overlap, slow_links


def test_says_what_is_missing():
    with mock.patch("os.geteuid", return_value=1000):
        assert (
            slow_links.missing() == "Making network namespaces takes root, which this user is not."
        )
    with mock.patch("os.geteuid", return_value=0), mock.patch("shutil.which", return_value=None):
        assert "The program ip is missing" in slow_links.missing()


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_collectives_are_called_again():
    """Those of a step, as many and as large; without the wire none is waited for."""
    with mock.patch.object(slow_links, "limit_link"):
        ((rate, *seconds, sent),) = overlap.costs(32, 8, 1, [1.0])
    assert rate == 1.0
    assert all(s > 0 for s in seconds)
    assert sent > 0


@pytest.mark.slow
def test_on_links_of_the_kernel():
    if lack := slow_links.missing():
        pytest.skip(lack)
    command = [sys.executable, "-m", "benchmarks.overlap", "--resolution", "64", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--gigabits", "0.1"], capture_output=True, text=True, check=True, timeout=300
    )
    assert "| 2 | 0.1 |" in done.stdout
    ip = shutil.which("ip")
    assert "slow" not in subprocess.run([ip, "link"], capture_output=True, text=True).stdout
