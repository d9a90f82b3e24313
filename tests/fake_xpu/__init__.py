"""An Intel GPU for tests without one: torch's own XPU device, with the memory of the host.

`install()` registers an allocator, a device guard, generators and kernels (torch's CPU kernels, on
copies) under the dispatch key of real Intel GPUs, and replaces the C functions below torch.xpu that
a wheel without XPU lacks (torch_xpu.py). `xccl` becomes gloo; like the real one it knows no tensors
of the CPU and no pre-multiplied sum (https://github.com/intel/torch-xpu-ops/issues/1571).

It shows where tensors are, which backend and autocast are chosen, which random numbers, streams,
events and memory are asked for, and that nothing falls to CUDA or to the CPU. It shows nothing of
kernels, drivers, speed or oneCCL. Registration cannot be taken back, so it is in processes of its
own: `@pytest.mark.spmd(n, "xpu")` runs a test on n of them (pool.py).
"""

import ctypes
import sys

from tests.fake_xpu.build import library, torch_folder


def install(devices: int = 2, memory_bytes: int = 2**32) -> None:
    """Make torch.xpu of this process the fake one; torch must not have been imported.

    torch keeps the answers of each kind of device from the first question on, and asks while it is
    imported.

    Args:
        devices: How many there are.
        memory_bytes: Of each; above, torch.OutOfMemoryError is raised.

    Raises:
        CannotBuildError: It cannot be compiled here.
        RuntimeError: torch has been imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake XPU must be installed before torch is imported")
    path = library()
    folder = torch_folder() / "lib"
    # as torch itself does it, so that the libraries find each other
    ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    ctypes.CDLL(str(path))  # says that it comes before CUDA's

    from tests.fake_xpu import torch_xpu

    torch_xpu.replace(devices, memory_bytes)
