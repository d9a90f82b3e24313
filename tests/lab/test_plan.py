"""What `plan` predicts of a rank, beside what ranks hold."""

import math
import warnings
import weakref
from contextlib import ExitStack
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import lightning_shard
from lightning_modules import TFNODarcy
from tests import training
from tests.lab.test_check import Net, data


class GPT(LightningModule):
    """Two blocks on token ids, which a domain does not split unless it is told to."""

    def __init__(self, width=16, vocabulary=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch["ids"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["ids"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + F.gelu(self.mlp(x))


def ids():
    return DataLoader([{"ids": torch.arange(512) % 31} for _ in range(8)], 8)


def fields():
    return DataLoader([{"x": torch.randn(1, 48, 40), "y": torch.randn(1, 48, 40)}] * 4, 4)


CASES = {
    "cnn": (Net, lambda: data((1, 64, 64))),
    "gpt": (GPT, ids),
    "tfno": (lambda: TFNODarcy(n_modes=(8, 8), hidden_channels=8, n_layers=2), fields),
}


class Alive(TorchDispatchMode):
    """The bytes of tensors that were made inside and are still alive."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if type(x) in (Tensor, nn.Parameter):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return out

    def bytes(self):
        alive = {id(s): s for ref in self.storages.values() if (s := ref()) is not None}
        return sum(s.nbytes() for s in alive.values())


class Measure(Callback):
    """What forward leaves behind: what backward will need, and parameters that are gathered."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        parts = [x.to_local() if hasattr(x, "to_local") else x for x in tree_leaves(batch)]
        self.batch = sum(x.nbytes for x in parts)
        self.held = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
        self.stack, self.mode = ExitStack(), Alive()
        self.stack.enter_context(self.mode)

    def on_before_backward(self, trainer, module, loss):
        self.stack.close()
        self.kept = self.mode.bytes()


def measured(name, processes):
    """On each rank: kept after forward, batch, shards of parameters, all parameters."""
    warnings.simplefilter("ignore")  # a forked rank begins with pytest's filters
    torch.manual_seed(0)
    make, loader = CASES[name]
    module, seen = make(), Measure()
    runner = training.trainer((processes,), callbacks=[seen], max_steps=1)
    runner.fit(module, loader())
    whole = sum(p.nbytes for p in module.parameters())
    return seen.kept, seen.batch, sum(p.nbytes for p in seen.held), whole


FAST = {("cnn", 2), ("gpt", 1), ("tfno", 1)}


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in product(CASES, (1, 2, 4))
    ],
)
def test_prediction_and_measured_bytes(name, processes):
    make, loader = CASES[name]
    plan = lightning_shard.plan(make(), loader(), processes, processes)
    ranks = lightning_shard.launch(measured, name, processes, processes=processes)
    kept, batch, _, whole = (max(values) for values in zip(*ranks, strict=True))
    held = sum(rank[2] for rank in ranks) / processes  # rows of small tensors are uneven
    gathered = whole if processes > 1 else 0  # small networks are one block
    assert plan.activations == pytest.approx(kept - gathered, rel=0.1)
    assert plan.batch == batch
    assert plan.parameters == pytest.approx(held, rel=0.1)
    split = {"cnn": {"x", "y"}, "gpt": set(), "tfno": {"x", "y"}}[name] if processes > 1 else set()
    assert set(plan.split.split) == split


@pytest.mark.slow
def test_what_is_not_split_does_not_shrink():
    alone = lightning_shard.plan(GPT(), ids(), processes=1)
    many = lightning_shard.plan(GPT(), ids(), processes=8, domain_parallel_size=8)
    assert many.activations == pytest.approx(alone.activations, rel=0.02)
    assert many.batch == alone.batch == 8 * 512 * 8
    lines = str(many).splitlines()
    assert lines[0] == "split over the domain: nothing; whole: ids (int64)"
    assert lines[1].startswith("Warning: nothing of the batch is split, though 8 ranks share each")


def test_what_is_split_shrinks_to_a_share_and_halos():
    batches = data((1, 64, 64))
    many = lightning_shard.plan(Net(), batches, processes=8, domain_parallel_size=8)
    fields = 2 * 64 * 64 * 4 // 8
    # as in test_plan, with a row of each of two neighbours; parts are so thin that the second
    # convolution, too, keeps a copy of its input with them
    assert many.activations == pytest.approx((4 + 5 * 10 / 8 + 4 + 1) * fields, rel=0.05)
    assert many.batch == 2 * fields
    assert math.prod(many.rehearsed) == 4


def test_plan():
    module = Net(optimizer=torch.optim.Adam)
    expected = lightning_shard.plan(module, data((1, 64, 64)), processes=4, domain_parallel_size=2)
    numbers = sum(p.numel() for p in module.parameters())
    assert expected.parameters == expected.gradients == numbers
    assert 2 * numbers <= expected.optimizer < 3 * numbers
    fields = 2 * 64 * 64 * 4 // 2  # bytes of one channel on one rank
    # inputs of the norm and of the first convolution (with a row of a neighbour), result of the
    # activation, a neighbour's row of it for the second convolution, difference
    kept = 4 + 33 / 32 + 4 + 4 / 32 + 1
    assert expected.activations == pytest.approx(kept * fields, rel=0.01)
    assert expected.batch == 2 * fields
    assert expected.sent_for_parameters == 3 * 4 * numbers * 3 // 4
    halo = 2 * 64 * 4  # bytes of one row of one channel
    # of x and four channels one row forward, and of gradients of four channels backward
    assert 9 * halo <= expected.sent_for_fields <= 9 * halo + 2000
    alone = lightning_shard.plan(module, data((1, 64, 64)), processes=1)
    assert alone.activations == pytest.approx(9 * 2 * fields, rel=0.01)  # that result is the input
    assert alone.sent_for_parameters == alone.sent_for_fields == 0
    text = str(expected)
    assert text.startswith("split over the domain: x (dim 2), y (dim 2)")
    assert "One of 4 ranks (2 data replicas x 2 domain ranks)" in text
    assert "measured on 2 ranks" in text


def test_plan_of_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="the 6 processes must be a multiple of the 4 ranks"):
        lightning_shard.plan(Net(), data(), processes=6, domain_parallel_size=(2, 2))
