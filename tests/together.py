"""Which files one worker of pytest-xdist takes together."""

from xdist.scheduler import LoadFileScheduling

# what is costly to begin with, and is kept by a worker, is there once
TOGETHER = {
    "fake xpu": (
        "tests/trainer/xpu",
        "tests/fake_xpu",
        "tests/lab/test_calibrate.py",
        "tests/lab/test_least_tiles.py",
        "tests/lab/test_own_kernels.py",
        "tests/lab/test_tiled_programs.py",
        "tests/lab/test_tiled_training.py",
        "tests/memory/paging/test_sleep.py",
        "tests/memory/test_in_tiles.py",
        "tests/ops/norm/test_norms_on_a_device.py",
        "tests/ops/spectral/test_real_inverse.py",
    ),
    "what DTensor remembers of models on meshes": (
        "tests/trainer/test_exactness.py",
        "tests/checkpoint/test_resume",
        "tests/checkpoint/test_averages.py",
        "tests/fsdp",
    ),
}


class Together(LoadFileScheduling):
    """Gives a worker whole files, and some files together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((name for name, paths in TOGETHER.items() if file.startswith(paths)), file)
