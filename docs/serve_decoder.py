"""A decoder that is split over ranks, behind HTTP: rank 0 listens on loopback, the others follow.

python docs/serve_decoder.py --ranks 2 --port 8000

`POST /decode` takes a safetensors file with a tensor `latents` (C, H, W) of any height and width.
The answer is one with a tensor `image` (3, 8 H, 8 W). `GET /health` counts the requests that wait
or are in work. The page predictions.md explains it. To serve another network change `make_decoder`,
`decoded` and `latents_of`.
"""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import uvicorn
from safetensors import SafetensorError
from safetensors.torch import load, save
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_shard import init_mesh, launch, process_info, split_inputs, start_process_group

CHANNELS, LARGEST = 4, 128  # of latents: their channels, and most rows or columns
BYTES = 8 * CHANNELS * LARGEST**2 + 2**16  # of a request
BODY_S, RANK_S = 10.0, 60.0  # seconds for a client to send its request, and for a rank to answer
BEAT_S, LEAVE_S = 0.5, 4.0  # seconds between signs of life, and for requests once the server ends
STAY, END = "stay", "end"  # what rank 0 sends beside latents
models: Any = diffusers  # which imports lazily


def make_decoder(dtype: torch.dtype) -> Any:
    """Build a coder of images with random weights, the same on all ranks."""
    torch.manual_seed(0)
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    widths = (16, 32, 32, 32)
    return models.AutoencoderKL(3, 3, down, up, widths, norm_num_groups=8).eval().to(dtype)


@torch.inference_mode()
def decoded(decoder: Any, latents: Tensor) -> Tensor:
    """Decode latents (C, H, W) to an image (3, 8 H, 8 W). All ranks call it."""
    image = decoder.decode(latents[None].to(decoder.device, decoder.dtype)).sample[0]
    return image.cpu().contiguous()  # as safetensors takes it


def latents_of(body: bytes) -> Tensor:
    """Read the latents (C, H, W) of a request.

    Raises:
        HTTPException: It holds something else, or too many numbers.
    """
    try:
        latents = load(body)["latents"]
    except (SafetensorError, KeyError, ValueError) as err:
        sentence = "the body must be a safetensors file with a tensor named 'latents'."
        raise HTTPException(422, sentence) from err
    shape, dtype = tuple(latents.shape), latents.dtype
    if len(shape) != 3 or shape[0] != CHANNELS or not all(0 < n <= LARGEST for n in shape[1:]):
        sizes = f"({CHANNELS}, 1 to {LARGEST}, 1 to {LARGEST})"
        raise HTTPException(422, f"latents must have the shape {sizes}; got {shape}.")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise HTTPException(422, f"latents must be floating-point numbers; got {dtype}.")
    if not latents.isfinite().all():
        raise HTTPException(422, "latents must be finite; got NaN or infinity.")
    return latents


async def body_of(request: Request) -> bytes:
    """Receive the body of a request, which may be too long, too slow or broken off."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > BYTES:
                    raise HTTPException(413, f"a request has at most {BYTES} bytes.")
    except TimeoutError as err:
        raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s.") from err
    except ClientDisconnect as err:
        raise HTTPException(400, "the client has gone.") from err
    return bytes(body)


class Leader:
    """Takes requests on rank 0, and decodes one after the other together with all ranks.

    Args:
        decoder: The decoder, within `split_inputs`.
        waiting: The number of requests that may wait for the one in work; more get a 503.
    """

    def __init__(self, decoder: Any, waiting: int) -> None:
        self.decoder, self.waiting, self.failure = decoder, waiting, ""
        self.ranks = ThreadPoolExecutor(1)  # one thread talks to the other ranks, in turn
        self.jobs = set[Future[Tensor]]()  # that wait or are in work
        routes = [Route("/decode", self.decode, methods=["POST"]), Route("/health", self.health)]
        application = Starlette(routes=routes, lifespan=self.beating)
        config = uvicorn.Config(application, log_level="warning", limit_concurrency=8 * waiting + 8)
        config.timeout_graceful_shutdown = int(LEAVE_S)
        self.http = uvicorn.Server(config)

    def serve(self, port: int) -> None:
        """Listen on this port of loopback (0: a free one) until a signal, or a rank's failure."""
        self.http.config.port = port
        socket = self.http.config.bind_socket()
        socket.listen()  # who reads the address may connect, and waits until the server runs
        address = "http://{}:{}".format(*socket.getsockname())
        print(f"serving on {address} with {dist.get_world_size()} ranks", flush=True)
        self.http.run([socket])  # it takes SIGINT and SIGTERM, and finishes what it has accepted
        self.ranks.shutdown(cancel_futures=True)
        if self.failure:
            raise RuntimeError(self.failure)
        tell(END)

    def call(self, message: Any) -> Tensor:
        """Send latents or STAY to all ranks, and decode; the thread of `ranks` alone calls it."""
        if self.failure:
            raise RuntimeError(self.failure)
        try:
            tell(message)
            return decoded(self.decoder, message) if isinstance(message, Tensor) else torch.empty(0)
        except Exception as err:  # the other ranks may wait for this one, so all must end
            reason = (str(err).strip().splitlines() or [repr(err)])[0]
            self.failure = f"a rank has failed, and the server ends: {reason}"
            self.http.should_exit = True
            raise RuntimeError(self.failure) from err

    async def decode(self, request: Request) -> Response:
        """Answer with the image of the latents in the body, or with one sentence."""
        latents = latents_of(await body_of(request))
        if self.failure or len(self.jobs) > self.waiting:
            raise HTTPException(503, self.failure or "too many requests wait; try again later.")
        job = self.ranks.submit(self.call, latents)
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)
        image = asyncio.wrap_future(job)
        gone = asyncio.ensure_future(request.receive())  # the next message: the client has left
        await asyncio.wait([image, gone], return_when=asyncio.FIRST_COMPLETED)
        if not image.done():
            image.cancel()  # while it waits; what the ranks work on they finish
            raise HTTPException(400, "the client has gone.")
        gone.cancel()
        try:
            return Response(save({"image": image.result()}), media_type="application/octet-stream")
        except RuntimeError as err:
            raise HTTPException(503, str(err)) from err

    async def health(self, _: Request) -> Response:
        """Answer with the number of requests that wait or are in work, or with the failure."""
        status = 503 if self.failure else 200
        return JSONResponse({"requests": len(self.jobs), "error": self.failure}, status)

    @contextlib.asynccontextmanager
    async def beating(self, _: Starlette) -> AsyncGenerator[None]:
        """Send signs of life while the server runs: so a rank that died is found at once."""

        async def beat() -> None:
            while not self.failure:
                await asyncio.sleep(BEAT_S)
                with contextlib.suppress(RuntimeError):  # `failure` has it
                    await asyncio.wrap_future(self.ranks.submit(self.call, STAY))

        task = asyncio.create_task(beat())
        yield
        task.cancel()


def tell(message: Any) -> Any:
    """Send latents or a word from rank 0 to the others; return on each what it received."""
    box = [message]
    dist.broadcast_object_list(box, 0)
    return box[0]


def serve(port: int, waiting: int, dtype: torch.dtype) -> None:
    """Serve as rank 0, or decode what it sends. Every rank calls it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 hears them, and tells the others
        signal.signal(number, lambda *_: None)
    mesh = init_mesh({"domain": dist.get_world_size()})
    decoder = make_decoder(dtype).to(mesh.device_type)
    with split_inputs(decoder, mesh, methods=["decode"]):
        if dist.get_rank() == 0:
            Leader(decoder, waiting).serve(port)
            return
        with ThreadPoolExecutor(1) as ranks:  # all ranks decode in a thread of this kind
            ranks.submit(follow, decoder).result()


def follow(decoder: Any) -> None:
    """Decode what rank 0 sends until it ends."""
    while (message := tell(None)) != END:
        if isinstance(message, Tensor):
            decoded(decoder, message)


def main() -> None:
    """Start the ranks, or serve as one of those that a launcher has started."""
    parser = argparse.ArgumentParser(description="An HTTP server of a decoder split over ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="of loopback; 0 takes a free one")
    parser.add_argument("--waiting", type=int, default=8, help="requests that may wait")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    options = parser.parse_args()
    given = (options.port, options.waiting, getattr(torch, options.dtype))
    if process_info().world_size > 1:
        start_process_group(timeout_s=RANK_S)
        serve(*given)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `launch` ends the ranks, then
    try:
        launch(serve, *given, processes=options.ranks, timeout_s=RANK_S)
    except KeyboardInterrupt:
        print("the server has ended", flush=True)
    except ProcessExitedException as err:
        raise SystemExit(str(err)) from None


if __name__ == "__main__":
    main()
