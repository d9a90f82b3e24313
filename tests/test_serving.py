"""docs/serve_decoder.py: exact, and no request, rank or signal leaves the server hanging."""

import http.client
import importlib.util
import json
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from safetensors.torch import save

from benchmarks.serving import SERVER, post, served

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytestmark = pytest.mark.slow  # each server imports diffusers anew


def example():
    spec = importlib.util.spec_from_file_location("serve_decoder", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def latents(height, width):
    generator = torch.Generator().manual_seed(height)
    return torch.randn(4, height, width, dtype=torch.float64, generator=generator)


def ended(process, ranks):
    """The exit code and the last line; no rank is left."""
    out, _ = process.communicate(timeout=60)
    assert not psutil.wait_procs(ranks, 20)[1]
    return process.returncode, out.strip().splitlines()[-1:]


def ranks_of(process):
    found = psutil.Process(process.pid).children(recursive=True)
    return [p for p in found if "serve_decoder" in " ".join(p.cmdline())]


def waiting(address):
    with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
        return json.load(answer)["requests"]


def leave_at_once(address, body):
    """Send a whole request, and close the connection without an answer."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /decode HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)


def test_requests_of_all_kinds():
    with served("--waiting", "2", "--dtype", "float64") as (process, address):
        ranks = ranks_of(process)
        check_exact(address)
        check_hostile(address)
        check_busy(address)
        check_clients_that_leave(address)
        process.send_signal(signal.SIGTERM)
        assert ended(process, ranks) == (0, ["the server has ended"])


def check_exact(address):
    torch.set_num_threads(1)
    decoder = example().make_decoder(torch.float64)
    for size in ((5, 7), (16, 9), (1, 3), (8, 8)):
        status, image = post(address, latents(*size))
        assert status == 200, image
        with torch.inference_mode():
            whole = decoder.decode(latents(*size)[None]).sample[0]
        torch.testing.assert_close(image, whole, rtol=1e-10, atol=1e-10 * whole.abs().max().item())


HEADER = json.dumps({"latents": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}})
HOSTILE = {
    "nothing": (b"", 422), "JSON": (b'{"latents": [[[0.5]]]}', 422), "noise": (b"\xff" * 99, 422),
    "another name": (save({"x": latents(2, 2)}), 422),
    "a header that lies": (len(HEADER).to_bytes(8, "little") + HEADER.encode(), 422),
    "two dims": (save({"latents": latents(2, 2)[0]}), 422),
    "three channels": (save({"latents": latents(2, 2)[:3].contiguous()}), 422),
    "no rows": (save({"latents": torch.ones(4, 0, 3)}), 422),
    "many rows": (save({"latents": torch.ones(4, 999, 1)}), 422),
    "integers": (save({"latents": torch.ones(4, 2, 2, dtype=torch.int64)}), 422),
    "NaN": (save({"latents": latents(2, 2) * torch.nan}), 422),
    "too long": (bytes(2**20), 413),
}  # fmt: skip


def check_hostile(address):
    for name, (body, code) in HOSTILE.items():
        status, sentence = post(address, body)
        assert status == code, name
        assert sentence.endswith(".") or "got" in sentence
        assert "\n" not in sentence
    assert post(address, latents(4, 4))[0] == 200


def check_busy(address):
    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda _: post(address, latents(32, 32)), range(12)))
    assert {status for status, _ in found} == {200, 503}
    assert sum(status == 200 for status, _ in found) >= 3
    assert all("try again" in text for status, text in found if status == 503)


def check_clients_that_leave(address):
    for _ in range(3):
        leave_at_once(address, save({"latents": latents(32, 32)}))
    deadline = time.monotonic() + 60
    while waiting(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert post(address, latents(4, 4))[0] == 200


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all(rank):
    with served("--dtype", "float64") as (process, address), ThreadPoolExecutor(3) as clients:
        ranks = ranks_of(process)
        assert len(ranks) == 2
        asked = [clients.submit(post, address, latents(64, 64)) for _ in range(3)]
        while not waiting(address):
            time.sleep(0.05)
        sorted(ranks, key=lambda p: p.pid)[rank].kill()
        code, last = ended(process, ranks)
        assert code == 1
        assert last == [f"rank {rank} ended with SIGKILL and no result, so all ranks were ended."]
        for one in asked if rank else ():
            status, sentence = one.result(60)
            assert status == 503
            assert sentence.startswith("a rank has failed, and the server ends: ")
        for one in asked if not rank else ():  # who listened is no more
            assert isinstance(one.exception(60), OSError | http.client.HTTPException)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_answers_what_was_accepted():
    with served() as (process, address), ThreadPoolExecutor(1) as clients:
        ranks = ranks_of(process)
        asked = clients.submit(post, address, latents(16, 16))
        while not waiting(address):
            time.sleep(0.01)
        for one in (process, *ranks):  # as a terminal does
            one.send_signal(signal.SIGINT)
        assert asked.result(60)[0] == 200
        assert ended(process, ranks) == (0, ["the server has ended"])
