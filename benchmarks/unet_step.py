"""A training step of a U-Net with group norm: its field split over two ranks, beside the limit.

    python -m benchmarks.unet_step --resolution 256

Forward, mean square and backward of one sample, on one thread for each rank. The limit is what two
plain processes take that each compute half of the rows at the same time and tell each other
nothing. "Whole" is the whole field on one plain thread, while the other rank does the same.
"Compiled" is the split field through compiled blocks, with --compile. All take turns in one run.
Each figure is the median of its rounds, on the rank that needs most. Gradients are not averaged:
that is FSDP2's work, the same for all.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lightning_shard
from benchmarks.common import describe, start, table
from lightning_shard.memory.recompute import compile_forward
from lightning_shard.trainer.profile.traffic import counted


class UNet(nn.Module):
    """Two convolutions with group norm at each of four resolutions, down and up again.

    Args:
        channels: Of the finest resolution.
        given: Channels of the field.
        conv: `nn.Conv2d`, or `nn.Conv3d` for volumes.
    """

    def __init__(
        self, channels: int, given: int = 3, conv: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d
    ) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        double = partial(_double, conv)
        self.down = nn.ModuleList(map(double, [given, *widths[:-1]], widths))
        self.up = nn.ModuleList(double(wide + low, low) for low, wide in pairwise(widths))
        self.head = conv(channels, 1, 1)
        self.pool = F.max_pool2d if conv is nn.Conv2d else F.max_pool3d

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, *spatial) -> (B, 1, *spatial)."""
        kept = []
        for block in self.down:
            x = block(self.pool(x, 2) if kept else x)
            kept.append(x)
        for block, beside in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return self.head(x)


def _double(conv: type[nn.Conv2d | nn.Conv3d], given: int, made: int) -> nn.Sequential:
    layers = []
    for channels in (given, made):
        layers += [conv(channels, made, 3, padding=1), nn.GroupNorm(8, made), nn.ReLU()]
    return nn.Sequential(*layers)


def costs(
    resolution: int, channels: int, rounds: int, compiled: bool, stored: torch.memory_format
) -> dict[str, tuple[float, ...]]:
    """Processor seconds, wall-clock seconds, collectives and bytes of a step, on the worst rank."""
    torch.manual_seed(0)
    net = UNet(channels).to(memory_format=stored)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(1, 3, resolution, resolution).to(memory_format=stored)
    split = lightning_shard.shard(whole, mesh, 2)
    fields = {"whole": whole, "limit": split.to_local(), "split": split}
    nets = dict.fromkeys(fields, net)
    if compiled:
        fields["compiled"], nets["compiled"] = split, copy.deepcopy(net)
        compile_forward([*nets["compiled"].down, *nets["compiled"].up])
        _step(nets["compiled"], split)  # compiles
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in fields}
    traffic = {}
    for name, field in fields.items():
        with counted() as traffic[name]:
            _step(nets[name], field)
    for _ in range(rounds):
        for name, field in fields.items():
            dist.barrier()
            begin = time.process_time(), time.perf_counter()
            _step(nets[name], field)
            spent[name].append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    found = {}
    for name, times in spent.items():
        medians = [statistics.median(each) for each in zip(*times, strict=True)]
        worst = torch.tensor([*medians, traffic[name].calls, traffic[name].bytes])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found[name] = tuple(worst.tolist())
    return found


def _step(net: Callable[[Tensor], Tensor], field: Tensor) -> None:
    net(field).square().mean().backward()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--compile", action="store_true", help="takes minutes before the first round"
    )
    parser.add_argument("--channels-last", action="store_true", help="how all tensors lie")
    options = parser.parse_args()
    stored = torch.channels_last if options.channels_last else torch.contiguous_format
    sizes = options.resolution, options.channels, options.rounds
    found = start(2, costs, *sizes, options.compile, stored)
    describe()
    print(f"U-Net, {options.resolution}², {options.channels} channels, on 2 ranks")
    limit = found["limit"][0]
    rows = [
        [name, f"{cpu * 1e3:.0f}", f"{cpu / limit:.2f}", f"{wall * 1e3:.0f}", f"{calls:.0f}",
         f"{sent / 1e6:.2f}"]
        for name, (cpu, wall, calls, sent) in found.items()
    ]  # fmt: skip
    table(["step", "CPU ms", "to the limit", "wall ms", "collectives", "MB sent"], rows)


if __name__ == "__main__":
    main()
