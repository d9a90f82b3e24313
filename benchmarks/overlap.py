"""A U-Net's step on slow links, with and without communication that hides behind computation.

    python -m benchmarks.overlap --resolution 512 --gigabits 0.1 1 10 --ranks 2 4

The links are real ones of the kernel, limited by `tc` (benchmarks/slow_links.py). "Computation" is
the step with collectives that return at once. "Wire" is the step's collectives one after another
with nothing between. No step can be faster than the larger of the two; one that hides nothing takes
their sum. All take turns in one run, and a figure is the median of the rounds, of the rank that
takes longest. The field's rows are split; gradients are not averaged.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import lightning_shard
from benchmarks import slow_links
from benchmarks.common import describe, in_turns, most, table
from benchmarks.networks import UNet
from lightning_shard.domain.halo import overlapping
from lightning_shard.trainer.profile.traffic import counted

NAMES = ("all_to_all_single", "all_reduce")


def costs(
    resolution: int, channels: int, rounds: int, gigabits: list[float]
) -> list[tuple[Any, ...]]:
    """For each rate the seconds of computation, wire, waiting and overlapping; and the bytes."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    net = UNet(channels)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.randn(1, 3, resolution, resolution)
    local = lightning_shard.shard(whole, mesh, 2).to_local().clone()
    field = lightning_shard.from_local(local, mesh, 2, whole.shape)

    def step() -> None:
        net(field).square().mean().backward()

    step()
    with counted() as traffic:
        step()
    with _recorded() as calls:
        step()
    sides = {
        "computation": _within(_without_wire, step),
        "wire": lambda: [call() for call in calls],
        "waiting": _within(lambda: overlapping("never"), step),
        "overlapping": _within(lambda: overlapping("auto"), step),
    }
    found = []
    for rate in gigabits:
        slow_links.limit_link(rate * 1e9)
        in_turns(sides, 1)  # warms up
        times = in_turns(sides, rounds)
        found.append((rate, *most(*(wall for _, wall in times.values()), traffic.bytes)))
    return found


def _within(around: Callable[[], Any], run: Callable[[], None]) -> Callable[[], None]:
    def way() -> None:
        with around():
            run()

    return way


class _Done:
    """The handle of a collective that has nothing to do."""

    def wait(self) -> None:
        """Return at once."""


@contextlib.contextmanager
def _without_wire() -> Generator[None]:
    def zeros(filled: Tensor, *args: Any, **kwargs: Any) -> _Done:
        filled.zero_()  # what memory held before may be numbers that are slow to compute with
        return _Done()

    with (
        mock.patch.object(dist, "all_to_all_single", zeros),
        mock.patch.object(dist, "all_reduce", return_value=None),
    ):
        yield


@contextlib.contextmanager
def _recorded() -> Generator[list[Callable[[], Any]]]:
    """The collectives of a step, to be called again on tensors like theirs."""
    calls: list[Callable[[], Any]] = []

    def recording(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            alike = [torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args]
            calls.append(lambda: collective(*alike, **(kwargs | {"async_op": False})))
            return collective(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(dist, name, recording(getattr(dist, name))))
        yield calls


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.1, 1, 10])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    options = parser.parse_args()
    if lack := slow_links.missing():
        sys.exit(lack)
    slow_links.inside("benchmarks.overlap")
    sizes = options.resolution, options.channels, options.rounds, options.gigabits
    found = {ranks: slow_links.start(ranks, costs, *sizes) for ranks in options.ranks}
    describe()
    print(f"U-Net, {options.resolution}², {options.channels} channels; milliseconds by the clock")
    rows = [
        [ranks, f"{rate:g}", *(f"{1e3 * s:.0f}" for s in seconds),
         f"{seconds[0] * 1e3 + seconds[1] * 1e3:.0f}", f"{seconds[3] / max(seconds[:2]):.2f}",
         f"{sent / 1e6:.2f}"]
        for ranks, (rate, *seconds, sent) in itertools.chain.from_iterable(
            zip([ranks] * len(each), each, strict=True) for ranks, each in found.items()
        )
    ]  # fmt: skip
    head = ["ranks", "Gb/s", "computation", "wire", "waiting", "overlapping", "sum",
            "to the larger", "MB sent"]  # fmt: skip
    table(head, rows)


if __name__ == "__main__":
    main()
