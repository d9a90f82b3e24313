"""Which files one worker of pytest-xdist takes together."""

import functools
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
# What DTensor remembers of models on meshes is costly to begin with, and is kept by a worker
ON_MESHES = (
    "tests/trainer/test_exactness.py",
    "tests/checkpoint/test_resume",
    "tests/checkpoint/test_averages.py",
    "tests/fsdp",
)


class Together(LoadFileScheduling):
    """Gives a worker whole files, and some files together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith(ON_MESHES):
            return "models on meshes"
        return "fake xpu" if _has_fake_xpu(file) else file


@functools.cache
def _has_fake_xpu(file: str) -> bool:
    """Return whether tests of a file run on ranks with a fake XPU, which are costly to begin."""
    return file.startswith("tests/trainer/xpu") or ', "xpu")' in (ROOT / file).read_text()
