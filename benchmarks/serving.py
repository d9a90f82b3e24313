"""A load test of docs/serve_decoder.py: requests of changing sizes, from several clients at once.

    python -m benchmarks.serving --ranks 1 2 --requests 60 --clients 4

Starts the server on each number of ranks, waits for one answer of each size, and prints how many
requests were answered, how many a second, and how long clients waited. Those that found all places
taken (503) are counted apart, and not sent again.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from benchmarks.common import describe, table

SERVER = Path(__file__).parents[1] / "docs/serve_decoder.py"
SIZES = [(5, 7), (16, 16), (24, 9), (32, 32)]  # of latents; 40 x 56 to 256 x 256 pixels


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server with these options on a free port; yield the process and its address."""
    command = [sys.executable, "-W", "ignore", str(SERVER), "--port", "0", *options]
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, stdout=out, stderr=err, text=True) as process:
        try:
            assert process.stdout
            said = []
            for line in process.stdout:
                said.append(line)
                if found := re.match(r"serving on (\S+)", line):
                    yield process, found[1]
                    break
            else:
                raise RuntimeError("the server did not start:\n" + "".join(said))
        finally:
            process.terminate()


def post(address: str, body: bytes | Tensor) -> tuple[int, Tensor | str]:
    """Send latents (C, H, W), or bytes as they are; return the status and the image or sentence."""
    data = body if isinstance(body, bytes) else save({"latents": body})
    try:
        with urllib.request.urlopen(f"{address}/decode", data, timeout=120) as answer:
            return answer.status, load(answer.read())["image"]
    except urllib.error.HTTPError as err:
        return err.code, err.read().decode()


def loaded(address: str, requests: int, clients: int) -> list[str]:
    """Send the requests, and return the row of the table."""

    def one(size: tuple[int, int]) -> tuple[int, float]:
        begun = time.perf_counter()
        status, _ = post(address, torch.randn(4, *size))
        return status, time.perf_counter() - begun

    for size in SIZES:
        one(size)
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(one, itertools.islice(itertools.cycle(SIZES), requests)))
    wall = time.perf_counter() - begun
    times = sorted(seconds for status, seconds in found if status == 200)
    late = times[int(0.95 * (len(times) - 1))]
    busy = sum(status == 503 for status, _ in found)
    return [
        f"{len(times)}", f"{busy}", f"{len(times) / wall:.1f}",
        f"{1e3 * statistics.median(times):.0f}", f"{1e3 * late:.0f}",
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--waiting", type=int, default=8)
    options = parser.parse_args()
    describe()
    rows = []
    for ranks in options.ranks:
        with served("--ranks", str(ranks), "--waiting", str(options.waiting)) as (_, address):
            rows.append([str(ranks), *loaded(address, options.requests, options.clients)])
    table(["ranks", "answered", "503", "a second", "median ms", "95 % within ms"], rows)


if __name__ == "__main__":
    main()
