"""Domain parallelism in 300 lines: one image on several ranks, trained as by one process.

torchrun --nproc-per-node 3 docs/tutorial_300_lines.py

Each rank holds some rows of every image, and all the weights. Losses, gradients and weights equal
those of one process that holds whole images. Upper case letters are global extents, lower case ones
a rank's part: an image is (B, C, H, W), its part (B, C, h, W). The page of the same name explains
the five ideas; here nothing of lightning_shard is used.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

ROWS = 2  # the dim of an image that is split

# --- 1. Who owns which rows: integers, which every rank computes for itself -----------------------


def partition(extent: int, parts: int) -> list[tuple[int, int]]:
    """For each of `parts` ranks its rows [low, high) of `extent`: as even as can be.

    There is one partition of an extent over a number of ranks. So no rank ever tells another which
    rows it has, and what an operation puts out lies where the next one looks for it.
    """
    size, larger = divmod(extent, parts)  # the first `larger` ranks hold one row more
    lows = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(pairwise(lows))


@dataclass(frozen=True)
class Part:
    """This rank's rows of an image.

    Attributes:
        local: (B, C, h, W), the rows themselves.
        extent: H, the number of rows of the whole image.
    """

    local: Tensor
    extent: int

    def map(self, function: Callable[[Tensor], Tensor]) -> "Part":
        """Apply a function of single pixels: it needs no other rank."""
        return Part(function(self.local), self.extent)


def split(image: Tensor) -> Part:
    """Keep this rank's rows of an image that every rank holds."""
    low, high = partition(image.shape[ROWS], dist.get_world_size())[dist.get_rank()]
    return Part(image[:, :, low:high], image.shape[ROWS])


def gather(part: Part) -> Tensor:
    """The whole image on every rank: every rank needs all rows."""
    return fetch(part, [(0, part.extent)] * dist.get_world_size())


# --- 2. Rows from other ranks, and what goes back in the backward pass ----------------------------


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The rows that two spans share; an empty span if there are none."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def fetch(x: Part, needs: list[tuple[int, int]]) -> Tensor:
    """The rows that this rank needs, from the ranks that own them.

    Args:
        x: This rank's rows.
        needs: For *each* rank the global rows [low, high) that it needs. Every rank knows the needs
            of all, so each can send what is wanted without being asked.
    """
    owned, rank = partition(x.extent, dist.get_world_size()), dist.get_rank()
    mine = owned[rank]
    shared = [overlap(mine, need) for need in needs]
    sends = [(low - mine[0], high - mine[0]) for low, high in shared]  # my local rows
    receives = [high - low for low, high in (overlap(own, needs[rank]) for own in owned)]
    rows_first = x.local.movedim(ROWS, 0)
    return Fetch.apply(rows_first, sends, receives).movedim(0, ROWS)


class Fetch(Function):
    """Rows travel from their owners to whoever needs them; gradients travel back and are added.

    A row that two ranks have used has two gradients. Its owner adds them up: the sum is the adjoint
    of making copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[tuple[int, int]], receives: list[int]) -> Tensor:
        ctx.plan = sends, receives, len(x)
        return swap([x[low:high] for low, high in sends], receives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sends, receives, rows = ctx.plan
        lengths = [high - low for low, high in sends]
        returned = swap(list(grads[0].split(receives)), lengths).split(lengths)
        total = grads[0].new_zeros(rows, *grads[0].shape[1:])
        for (low, high), gradient in zip(sends, returned, strict=True):
            total[low:high] += gradient
        return total, None, None


def swap(pieces: list[Tensor], receives: list[int]) -> Tensor:
    """Send `pieces[p]` to rank p, and put what arrives, `receives[p]` rows of rank p, in order."""
    outgoing = torch.cat(pieces).contiguous()
    incoming = outgoing.new_empty(sum(receives), *outgoing.shape[1:])
    dist.all_to_all_single(incoming, outgoing, receives, [len(piece) for piece in pieces])
    return incoming


# --- 3. A convolution: fetch the rows under my output rows, then let torch convolve them ----------


def conv(x: Part, layer: nn.Conv2d) -> Part:
    """A convolution of the whole image, of which each rank computes its rows of the output."""
    assert layer.dilation == (1, 1)
    assert isinstance(layer.padding, tuple)
    (kernel, _), (stride, _), (pad, pad_columns) = layer.kernel_size, layer.stride, layer.padding
    extent = (x.extent + 2 * pad - kernel) // stride + 1

    def window(low: int, high: int) -> tuple[int, int]:
        """The input rows under output rows [low, high); they may lie beyond the image."""
        return low * stride - pad, (high - 1) * stride - pad + kernel

    outputs = partition(extent, dist.get_world_size())
    inside = (0, x.extent)
    needs = [overlap(window(*rows), inside) if rows[0] < rows[1] else (0, 0) for rows in outputs]
    local = fetch(x, needs)

    mine, need = outputs[dist.get_rank()], needs[dist.get_rank()]
    rows = mine[1] - mine[0]
    first, end = window(*mine) if rows else (0, kernel)  # one window of zeros where there are none
    zeros = 0, 0, max(need[0] - first, 0), 0
    local = F.pad(local, zeros)
    local = F.pad(local, (0, 0, 0, end - first - local.shape[ROWS]))
    result = F.conv2d(
        local, layer.weight, layer.bias, layer.stride, (0, pad_columns), groups=layer.groups
    )
    return Part(result[:, :, :rows], extent)


# --- 4. Statistics of the whole image: sums over ranks --------------------------------------------


class AllReduce(Function):
    """The sum over ranks, on every rank.

    Each rank's sum depends on each rank's part. So the gradient of a part is the sum of the
    gradients of all the sums: the same operation again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return AllReduce.apply(grads[0])


def group_norm(x: Part, layer: nn.GroupNorm) -> Part:
    """Mean and variance are those of the whole image: never the mean of the ranks' means."""
    _, channels, _, columns = x.local.shape
    groups = x.local.unflatten(1, (layer.num_groups, -1))  # (B, G, C/G, h, W)
    count = channels // layer.num_groups * x.extent * columns

    def mean(values: Tensor) -> Tensor:
        return AllReduce.apply(values.sum((2, 3, 4), keepdim=True)) / count

    centred = groups - mean(groups)
    normal = centred * (mean(centred.square()) + layer.eps).rsqrt()
    scale, shift = (p.view(1, -1, 1, 1) for p in (layer.weight, layer.bias))
    return Part(normal.flatten(1, 2) * scale + shift, x.extent)


def mean(x: Part) -> Tensor:
    """The mean over the whole image; the same number on every rank."""
    batch, channels, _, columns = x.local.shape
    return AllReduce.apply(x.local.sum()) / (batch * channels * x.extent * columns)


# --- 5. Gradients of the weights: the mean over ranks ---------------------------------------------


def average_gradients(module: nn.Module) -> None:
    """Each rank's gradient becomes the gradient of the loss.

    Every rank has started backward at its own copy of the loss, so P copies have flowed through
    the sums of part 4, and a rank's weight gradient is P times what its rows give. The sum over the
    ranks is P times the gradient, and their mean is the gradient.
    """
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


# --- A network, once for whole images and once for parts ------------------------------------------


class Network(nn.Module):
    """An ordinary network of torch; it knows nothing of ranks."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, padding=2)
        self.norm = nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 1, H/2, W/2), both rounded up."""
        return self.head(F.gelu(self.down(F.gelu(self.norm(self.stem(image))))))


def on_parts(network: Network, x: Part) -> Part:
    """The same on parts: the same layers, with the functions above."""
    x = group_norm(conv(x, network.stem), network.norm).map(F.gelu)
    return conv(conv(x, network.down).map(F.gelu), network.head)


def loss_whole(network: Network, image: Tensor, target: Tensor) -> Tensor:
    """The squared error of one process."""
    return (network(image) - target).square().mean()


def loss_on_parts(network: Network, image: Tensor, target: Tensor) -> Tensor:
    """The same number from this rank's rows of the image and of the target."""
    found, wanted = on_parts(network, split(image)), split(target)
    return mean(Part((found.local - wanted.local).square(), found.extent))


def batches(steps: int, rows: int, columns: int) -> list[tuple[Tensor, Tensor]]:
    """Random images and targets, the same on every rank."""
    torch.manual_seed(0)
    half = (rows + 1) // 2, (columns + 1) // 2
    return [
        (torch.randn(2, 1, rows, columns).double(), torch.randn(2, 1, *half).double())
        for _ in range(steps)
    ]


def train(
    *, parts: bool, steps: int = 4, rows: int = 13, columns: int = 9
) -> tuple[list[float], Network]:
    """A few steps of Adam, on parts or on whole images: the losses and the network."""
    torch.manual_seed(1)
    network = Network().double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for image, target in batches(steps, rows, columns):
        optimizer.zero_grad()
        loss = (loss_on_parts if parts else loss_whole)(network, image, target)
        loss.backward()
        if parts:
            average_gradients(network)
        optimizer.step()
        losses.append(loss.item())
    return losses, network


def main() -> None:
    """Train both ways on the ranks that torchrun has started, and compare."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ours, network = train(parts=True)
    theirs, alone = train(parts=False)
    weights = zip(network.parameters(), alone.parameters(), strict=True)
    worst = max(float((p - q).detach().abs().max()) for p, q in weights)
    if dist.get_rank() == 0:
        for one, many in zip(theirs, ours, strict=True):
            print(f"loss of one process {one:.15f}, of {dist.get_world_size()} ranks {many:.15f}")
        print(f"largest difference of a weight after {len(ours)} steps: {worst:.1e}")


if __name__ == "__main__":
    main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.destroy_process_group()
