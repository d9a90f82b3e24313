"""Plain tensors that take split rows become split; where something sees them, they stay whole."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_shard
from lightning_shard import DomainTensor, UnsupportedOperationError
from tests.parity import assert_parity, assert_same, mesh_of

SHAPE = (2, 3, 7, 5)


def rollout(x):
    out = torch.zeros(2, 4, *SHAPE[1:], dtype=x.dtype)
    for step in range(4):
        x = x + 0.1 * x.sin()
        out[:, step] = x
    return out.square(), out


def shifted(x):
    out = x.new_zeros(x.shape)
    out[:, :, 1:] = x[:, :, :-1].clone()
    out[:, :, 0] = 7.0
    return out * x


def windows(x):
    out = torch.zeros(2, 6, 11, 9, dtype=x.dtype)
    out[:, ::2, 2:9, 3:-1] = x
    out[..., 4] = x[:, :1, 0, :1]
    return out.cumsum(2), out.mean((2, 3))


def accumulated(x):
    total = torch.zeros(SHAPE, dtype=x.dtype)
    for k in range(3):
        total += k * x
    best = torch.full(SHAPE, -1.0, dtype=x.dtype)
    best.copy_(x).clamp_(min=0.1)
    return total.clone() * best, total.add_(x) * 2


def of_graph(x, w):
    out = w * 2
    out[:, 1] = x[:, 0] * w[:, 2]
    out.mul_(x)
    return out


def masked(x):
    out, again = torch.ones(SHAPE, dtype=x.dtype), torch.ones(SHAPE, dtype=x.dtype)
    out[x > 0] = 3.0
    return out * x, again.masked_fill_(x > 0.5, 2.0)


def one_hot(x):
    classes = x.detach().argmax(1, keepdim=True)
    out, counts = torch.zeros(SHAPE, dtype=x.dtype), torch.zeros(SHAPE, dtype=x.dtype)
    counts.scatter_add_(dim=1, index=classes, src=x[:, :1])
    return out.scatter_(dim=1, index=classes, value=1) * x, counts


CASES = {
    "one_hot": (one_hot, [SHAPE]),
    "rollout": (rollout, [SHAPE]),
    "shifted": (shifted, [SHAPE]),
    "windows": (windows, [SHAPE]),
    "accumulated": (accumulated, [SHAPE]),
    "of_graph": (of_graph, [SHAPE, SHAPE]),
    "masked": (masked, [SHAPE]),
}


@pytest.mark.spmd(2)
def test_the_same_object_becomes_split():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2), 2)
    out = torch.zeros(SHAPE)
    alias = out
    out[:, 1] = x[:, 0]
    assert alias is out
    assert isinstance(out, DomainTensor)
    assert out.to_local().shape[2] == x.to_local().shape[2]


@pytest.mark.spmd(2)
def test_refusals():
    x = lightning_shard.shard(torch.randn(SHAPE), mesh_of(2), 2)
    leaf = nn.Parameter(torch.zeros(SHAPE))
    saved = torch.ones(SHAPE) * leaf
    saved_by = saved * saved
    for refused, reason in (
        (lambda: saved.add_(x), "autograd has saved"),
        (lambda: leaf.copy_(x), "leaf"),
        (lambda: torch.zeros(2, 3, 1, 5).__setitem__(slice(None), x[:, :, :1]), "can be split"),
    ):
        with pytest.raises(UnsupportedOperationError, match=reason):
            refused()
    with pytest.raises(UnsupportedOperationError, match="split differently"):
        x[:, :2] = lightning_shard.shard(torch.randn(2, 2, 7, 5), mesh_of(2), 1)
    assert saved_by.sum() == 0


def grid_of(x: Tensor) -> Tensor:
    """Copy each sample into its place, as `torchvision.utils.make_grid` does."""
    b, c, h, w = x.shape
    grid = x.new_full((c, h + 2, b * (w + 1)), 0.5)
    for k in range(b):
        grid.narrow(1, 1, h).narrow(2, k * (w + 1), w).copy_(x[k])
    return grid


def batch_of(x: Tensor) -> Tensor:
    """Pad images of several extents to one batch, as torchvision's detectors do."""
    images = [x[0], x[0, :, :, :4], x[1, :, 1:6]]
    batch = images[0].new_full((3, x.shape[1], 8, 8), 0)
    for i, image in enumerate(images):
        batch[i, : image.shape[0], : image.shape[1], : image.shape[2]].copy_(image)
    return batch * 2


def sliding(x: Tensor) -> Tensor:
    """Add windows to a buffer of another origin, as MONAI's sliding windows do."""
    total, count = torch.zeros(x.shape, dtype=x.dtype), torch.zeros(x.shape, dtype=x.dtype)
    for start in (0, 2):
        rows = slice(start, start + 5)
        total[:, :, :, rows] += x[:, :, :, rows] * (start + 1)
        count[:, :, :, rows] += 1
    return total / count.clamp(1)


def into_views(x: Tensor) -> tuple[Tensor, ...]:
    """Write into tensors that a view, or an array, sees."""
    viewed, numbers = torch.zeros(x.shape, dtype=x.dtype), torch.zeros(x.shape, dtype=x.dtype)
    kept, array = viewed.flatten(), numbers.numpy()
    viewed[:] = x
    viewed[:1].mul_(x[:1])
    numbers.add_(x.detach())
    return viewed, kept.clone(), numbers, torch.from_numpy(array)


INTO_VIEWS = {
    "grid": (grid_of, [(2, 3, 7, 5)]),
    "batch": (batch_of, [SHAPE]),
    "sliding": (sliding, [SHAPE]),
    "views": (into_views, [SHAPE]),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", INTO_VIEWS)
def test_writes_into_views(name):
    function, shapes = INTO_VIEWS[name]
    for dim in range(2, len(shapes[0])):
        assert_parity(function, shapes, {0: [dim]}, mesh_of(3))


def assigned(x, zeros):
    zeros[:, :, 1:] = x[:, :, :-1]
    return zeros * 2


def scattered(x, zeros):
    zeros.scatter_(1, x.argmax(1, keepdim=True), 1.0)
    return zeros * x


def with_modes(x, zeros):
    zeros[..., :2] = torch.fft.rfft2(x)[..., :2]
    return torch.fft.irfft2(zeros, s=x.shape[-2:])


def added_to_nodes(x, zeros):
    return zeros.index_add_(0, torch.arange(5).repeat(42), x.flatten()) * 2


SEEN_BY_ONE = {
    "assigned": (assigned, lambda x: torch.zeros(SHAPE)),
    "scattered": (scattered, lambda x: torch.zeros(SHAPE)),
    "with modes": (with_modes, lambda x: torch.zeros(2, 3, 7, 3, dtype=torch.complex64)),
    "added to nodes": (added_to_nodes, lambda x: x.new_zeros(5000)),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("name", SEEN_BY_ONE)
def test_a_view_of_one_rank(name):
    """The ranks agree whether something sees the tensor, or they would not pair their messages."""
    function, make = SEEN_BY_ONE[name]
    field = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    wanted = function(field, make(field))
    x = lightning_shard.shard(field, mesh_of(3), 2)
    zeros = make(x)
    kept = zeros[0] if dist.get_rank() == 1 else None
    found = lightning_shard.gather(function(x, zeros))
    assert_same(found, wanted)
    assert kept is None or torch.equal(kept, zeros[0])
