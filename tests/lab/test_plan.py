"""Predictions of `plan`, beside the bytes that ranks hold and send."""

import math
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import lightning_shard
from lightning_modules import TFNODarcy
from lightning_shard.lab.predict import rank_inside
from lightning_shard.trainer.profile.traffic import counted
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in product(CASES, (1, 2, 4))
    ],
)
def test_prediction_and_measured_bytes(name, processes):
    make, loader = CASES[name]
    plan = lightning_shard.plan(make(), loader(), (1, processes))
    ranks = lightning_shard.launch(measured, name, processes, processes=processes)
    kept, batch, _, whole = (max(values) for values in zip(*ranks, strict=True))
    held = ranks[rank_inside((1, processes))][2] + sum(b.nbytes for b in make().buffers())
    gathered = whole if processes > 1 else 0  # small networks are one block
    assert plan.activations == pytest.approx(kept - gathered, rel=0.1)
    assert plan.memory_by_cause["batch"] == batch
    assert plan.memory_by_cause["parameters"] == pytest.approx(held, rel=0.1)
    split = {"cnn": {"x", "y"}, "gpt": set(), "tfno": {"x", "y"}}[name] if processes > 1 else set()
    assert set(plan.split.split) == split


def test_one_process_is_called_so():
    alone = str(lightning_shard.plan(Net(), data()))
    assert "One process, in one training step" in alone
    assert "sent: " not in alone


@pytest.mark.slow
def test_what_is_not_split_does_not_shrink():
    alone = lightning_shard.plan(GPT(), ids(), "1x1")
    many = lightning_shard.plan(GPT(), ids(), 8)
    assert many.activations == pytest.approx(alone.activations, rel=0.02)
    batches = [plan.memory_by_cause["batch"] for plan in (alone, many)]
    assert batches == [8 * 512 * 8] * 2
    assert alone.alone == alone.memory == many.alone
    lines = str(many).splitlines()
    assert lines[0] == "split over the domain: nothing; whole: ids (int64)"
    assert lines[1].startswith("Warning: nothing of the batch is split, though 8 ranks share each")


@pytest.mark.slow
def test_what_is_split_shrinks_to_a_share_and_halos():
    many = lightning_shard.plan(Net(), data((1, 64, 64)), 8)
    fields = 2 * 64 * 64 * 4 // 8
    # as in test_plan, with a row of each of two neighbours; parts are so thin that the second
    # convolution, too, keeps a copy of its input with them
    assert many.activations == pytest.approx((4 + 5 * 10 / 8 + 4 + 1) * fields, rel=0.05)
    assert many.memory_by_cause["batch"] == 2 * fields


@pytest.mark.slow
def test_plan():
    module = Net(optimizer=torch.optim.Adam)
    found = lightning_shard.plan(module, data((1, 64, 64)), "2x2", sharding="full")
    causes = found.memory_by_cause
    rows = [p[1] for p in module.parameters() if len(p) > 1]  # those of rank 1 of 4
    own = 4 * sum(row.numel() for row in rows)
    assert causes["parameters"] == own + sum(b.nbytes for b in module.buffers())
    assert causes["optimizer"] == 2 * own + 4 * 6  # Adam's averages, and six counts of steps
    fields = 2 * 64 * 64 * 4 // 2  # bytes of one channel on one rank
    # inputs of the norm and of the first convolution (with a row of a neighbour), result of the
    # activation, a neighbour's row of it for the second convolution, difference
    kept = 4 + 33 / 32 + 4 + 4 / 32 + 1
    assert found.activations == pytest.approx(kept * fields, rel=0.01)
    assert causes["batch"] == 2 * fields
    assert sum(causes.values()) == found.memory < found.alone
    halo = 2 * 64 * 4  # bytes of one row of one channel
    # of x and four channels one row forward, and of gradients of four channels backward
    assert 9 * halo <= found.sent_for_fields <= 9 * halo + 2000
    alone = lightning_shard.plan(module, data((1, 64, 64)), (1, 1))
    assert alone.activations == pytest.approx(9 * 2 * fields, rel=0.01)  # that result is the input
    assert alone.sent == 0
    text = str(found)
    assert text.startswith("split over the domain: x (dim 2), y (dim 2)")
    assert "One of 4 ranks (2 data replicas x 2 domain ranks), in one training step" in text
    assert " ms " not in text  # no cluster, no time


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_bytes_that_a_rank_sends(mesh):
    module = Net(optimizer=torch.optim.Adam)
    found = lightning_shard.plan(module, data((1, 64, 64)), mesh)
    assert found.sent == found.sent_for_parameters + found.sent_for_fields
    sent = lightning_shard.launch(sent_by_ranks, mesh, processes=math.prod(mesh))
    assert found.sent == pytest.approx(sent[rank_inside(mesh)], rel=0.02)


def sent_by_ranks(mesh):
    """Return the bytes that this rank sends in the second step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    seen = []
    with counted() as traffic:
        note = LambdaCallback(
            on_train_batch_start=lambda *_: seen.append(traffic.bytes),
            on_train_batch_end=lambda *_: seen.append(traffic.bytes),
        )
        runner = training.trainer(mesh[1:], callbacks=[note], max_steps=2)
        runner.fit(Net(optimizer=torch.optim.Adam), data((1, 64, 64), samples=8))
    return seen[3] - seen[2]


@pytest.mark.slow
def test_a_cluster_adds_times_to_the_same_table():
    module, batches = Net(), data((1, 64, 64))
    here = lightning_shard.plan(module, batches, 2)
    there = lightning_shard.plan(module, batches, 2, cluster="2xH100")
    assert type(here) is type(there) is lightning_shard.Prediction
    assert math.isnan(here.seconds)
    assert there.seconds > 0
    besides = there.memory_by_cause["workspaces"]  # of the H100's convolutions
    assert 0 < there.memory - here.memory <= besides
    differing = ("memory", "memory_by_cause", "peak_at", *TIMES)
    assert replace(there, cluster=None) == replace(
        here, **{name: getattr(there, name) for name in differing}
    )
    rows = [str(plan).partition("training step:")[2].splitlines() for plan in (here, there)]
    names = [[row[:19].strip() for row in each] for each in rows]
    assert names[1][:7] == ["", "step", "compute", "fields", "link", "parameters", "hidden"]
    assert {*names[1][7:]} == {*names[0][1:], "workspaces"}


TIMES = ("seconds", "compute", "exchange", "link", "parameters_traffic", "overlapped")


@pytest.mark.parametrize("old", [{"processes": 4}, {"domain_parallel_size": 2}])
def test_earlier_ways_to_say_the_mesh_are_named(old):
    with pytest.raises(TypeError, match=r"plan\(\) has no argument .*; give the ranks as mesh"):
        lightning_shard.plan(Net(), data(), 2, **old)


def test_ranks_and_tiles_without_rows_are_refused():
    """A prediction of 1000 ranks would take minutes, and divide rows that are not there."""
    module = Net()
    for where, parts in (({"mesh": "1x1000"}, "ranks"), ({"tiles": 13}, "tiles")):
        with pytest.raises(ValueError, match=f"{parts} cannot share a dim of 12 rows"):
            lightning_shard.plan(module, data(), **where)
    assert lightning_shard.plan(module, data(), mesh="1x12").memory


@pytest.mark.slow
def test_what_is_compiled_is_counted_as_it_is_written():
    batches = data()
    plain, compiled = Net(), Net()
    compiled.first = torch.compile(compiled.first, backend="eager")
    memory = [lightning_shard.plan(net, batches, mesh=2).memory for net in (plain, compiled)]
    assert memory[0] == memory[1]
