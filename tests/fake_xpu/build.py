"""Compiles the fake device, once for each machine, torch and state of its source."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


class CannotBuildError(Exception):
    """There is no fake device on this machine, for the reason given."""


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def library() -> Path:
    """The compiled library, in the user's cache: made in about 20 s, from then on found.

    Environments with the same version of torch share it, wherever they are.

    Raises:
        CannotBuildError: There is no C++ compiler, or it refuses the source.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lightning_shard"
    folder.mkdir(parents=True, exist_ok=True)
    torch = torch_folder()
    options = [
        "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-DUSE_DISTRIBUTED",
        "-I{torch}/include", "-I{torch}/include/torch/csrc/api/include",
        "-L{torch}/lib", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    sources = [file.read_text() for file in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])]
    everything = "\n".join([version("torch"), *options, *sources])
    path = folder / f"fake_xpu_{hashlib.sha256(everything.encode()).hexdigest()[:16]}.so"
    with (folder / "fake_xpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may ask at the same time
        if not path.exists():
            _compile(path, [option.format(torch=torch) for option in options])
    return path


def _compile(path: Path, options: list[str]) -> None:
    names = (os.environ.get("CXX", ""), "c++", "g++")
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise CannotBuildError("the fake XPU needs a C++ compiler; install g++, or set CXX")
    part = path.with_suffix(".part")
    command = [compiler, str(HERE / "fake_xpu.cpp"), *options, "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{compiler} refuses the fake XPU:\n{done.stderr[:2000]}")
    part.replace(path)
