"""What torch refuses of a whole tensor is refused of a split one, on every rank."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lightning_shard
from lightning_shard.ops.registry import name_of
from tests.ops import database
from tests.ops.database import Sample
from tests.parity import mesh_of

D = torch.float64
LABELS = torch.zeros(3, 6, 5, dtype=torch.long)
ONES = torch.ones(7, dtype=D)
NINES = torch.full((3, 4, 2, 5), 9)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    # options that are no options
    "mse reduction": lambda x: F.mse_loss(x, x * 2, reduction="avg"),
    "mse batchmean": lambda x: F.mse_loss(x, x * 2, reduction="batchmean"),
    "huber reduction": lambda x: F.huber_loss(x, x * 2, reduction="avg"),
    "cross entropy reduction": lambda x: F.cross_entropy(x, LABELS, reduction="avg"),
    "kl reduction": lambda x: F.kl_div(x, x, reduction="avg"),
    "triplet reduction": lambda x: F.triplet_margin_loss(x, x, x, reduction="avg"),
    "triplet margin": lambda x: F.triplet_margin_loss(x, x, x, margin=-1.0),
    "interpolate mode": lambda x: F.interpolate(x, scale_factor=2, mode="other"),
    "pad mode": lambda x: F.pad(x, (1, 1), mode="other"),
    "gelu": lambda x: F.gelu(x, approximate="other"),
    "quantile": lambda x: x.quantile(0.3, 2, interpolation="other"),
    "quantile of more": lambda x: x.quantile(1.3, 2),
    "rounding mode": lambda x: torch.div(x, 2, rounding_mode="other"),
    "fft norm": lambda x: torch.fft.fft2(x, norm="other").abs(),
    "conv padding": lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, dtype=D), padding="other"),
    "grid mode": lambda x: F.grid_sample(x, torch.zeros(3, 2, 2, 2, dtype=D), mode="other"),
    "norm": lambda x: torch.norm(x, p="other"),
    "scatter reduce": lambda x: x.scatter_reduce(
        2, torch.zeros(x.shape, dtype=torch.long), x, "other"
    ),
    # numbers that are none
    "conv stride": lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, dtype=D), stride=0),
    "conv dilation": lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, dtype=D), dilation=-1),
    "conv padded by less": lambda x: F.conv2d(x, torch.ones(2, 4, 2, 2, dtype=D), padding=-1),
    "conv groups": lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3, dtype=D), groups=2),
    "pool padding": lambda x: F.max_pool2d(x, 3, padding=2),
    "dropout": lambda x: F.dropout(x, 1.5),
    "group norm": lambda x: F.group_norm(x, 3),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 3),
    "chunks": lambda x: x.chunk(0, 2),
    "top of more": lambda x: x.topk(9, 2),
    "transform of nothing": lambda x: torch.fft.fft(x, n=0).abs(),
    # dims and rows that are not there
    "softmax dim": lambda x: x.softmax(9),
    "sum dim": lambda x: x.sum(9),
    "dims twice": lambda x: x.sum((2, 2)),
    "permuted twice": lambda x: x.permute(0, 0, 1, 2),
    "flipped twice": lambda x: x.flip(2, 2),
    "shifts": lambda x: x.roll((1, 2), 2),
    "shift dim": lambda x: torch.fft.fftshift(x, dim=9),
    "narrow": lambda x: x.narrow(2, 4, 5),
    "select": lambda x: x.select(2, 9),
    "rows": lambda x: x.index_select(2, torch.tensor([9])),
    "indices": lambda x: x[:, :, torch.tensor([9])],
    "mask": lambda x: x[:, :, torch.ones(5, dtype=torch.bool)],
    "gather": lambda x: x.gather(2, NINES),
    "scatter": lambda x: x.scatter(2, NINES, x),
    "labels": lambda x: F.cross_entropy(x, LABELS + 9),
    # shapes that do not fit
    "conv channels": lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3, dtype=D)),
    "conv kernel": lambda x: F.conv2d(x, torch.ones(2, 4, 9, 3, dtype=D)),
    "layer norm": lambda x: F.layer_norm(x, (7,)),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "concatenated": lambda x: torch.cat([x, x[:, :2]], 2),
    "stacked": lambda x: torch.stack([x, x[:, :2]]),
    "added": lambda x: x + ONES,
    "where": lambda x: torch.where(x > 0, x, ONES),
    "filled": lambda x: x.masked_fill(ONES > 0, 1.0),
    "multiplied": lambda x: x @ torch.ones(4, 2, dtype=D),
    "summed": lambda x: torch.einsum("bchw,hk->bk", x, torch.ones(7, 2, dtype=D)),
    "expanded": lambda x: x.expand(3, 4, 7, 5),
    "viewed": lambda x: x.view(7, -1),
    "split": lambda x: x.split([2, 2], 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x[..., :3], x),
    "gated": lambda x: F.glu(x[:, :, :5], 2),
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("dim", [0, 2])
def test_wrong_arguments(dim):
    field = torch.randn(3, 4, 6, 5, dtype=D)
    accepted = []
    for name, call in CALLS.items():
        assert raises(lambda call=call: call(field.clone())), name
        split = lightning_shard.shard(field, mesh_of(2), dim)
        if not raises(lambda call=call, split=split: call(split)):
            accepted.append(name)
    assert not accepted


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False


@pytest.mark.spmd(2)
@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": False}], ids=str)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_deprecated_arguments_of_losses(legacy):
    """They would change the reduction."""
    x = lightning_shard.shard(torch.randn(4, 3, dtype=D), mesh_of(2), 0)
    target = torch.ones(4, dtype=D)
    for call in (
        lambda: F.mse_loss(x, x * 2, **legacy),
        lambda: F.cosine_embedding_loss(x, x * 2, target, **legacy),
        lambda: F.triplet_margin_loss(x, x * 2, x.sin(), **legacy),
    ):
        with pytest.raises(lightning_shard.UnsupportedOperationError, match="use reduction"):
            call()


def wrong_samples(name: str) -> Iterator[Sample]:
    """What torch's own tests of a function say that it refuses."""
    operator = database._database()[name]
    torch.use_deterministic_algorithms(True)  # all ranks then read the same in torch.empty
    try:
        errors = [*operator.error_inputs("cpu")]
    finally:
        torch.use_deterministic_algorithms(False)
    for error in errors:
        given = error.sample_input
        sample = Sample((given.input, *given.args), dict(given.kwargs))
        tensors = sample.tensors
        if tensors and all(t.layout == torch.strided and t.device.type == "cpu" for t in tensors):
            yield sample


def call_of(function: Callable[..., Any], sample: Sample, place: Callable[[int, Tensor], Tensor]):
    numbers = iter(range(100))
    copy = tree_map_only(Tensor, lambda t: place(next(numbers), t.detach().clone()), sample.args)
    named = tree_map_only(Tensor, lambda t: place(next(numbers), t.detach().clone()), sample.kwargs)
    return lambda: function(*copy, **named)


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [n for n, op in database._database().items() if op.error_inputs_func is not None]
)
def test_samples_of_torch(name):
    """An index that lies outside is refused by the ranks that read it."""
    accepted = []
    for sample in wrong_samples(name):
        for function in database.functions_of(name)[:2]:
            if not raises(call_of(function, sample, lambda _, t: t)):
                continue
            for tensors, dim in database.splits_of(sample)[:6]:

                def place(number, x, tensors=tensors, dim=dim):
                    return lightning_shard.shard(x, mesh_of(2), dim) if number in tensors else x

                refused = torch.tensor(int(raises(call_of(function, sample, place))))
                dist.all_reduce(refused)
                if refused < (1 if name == "gather" else 2):
                    accepted.append(f"{name_of(function)}({sample}), {tensors} along {dim}")
    assert not accepted, "\n".join(accepted)
