"""Loops of Lightning Fabric under the strategy equal a plain loop of one process."""

import tempfile
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import DoublePrecision
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import lightning_shard
from lightning_shard import FabricShardStrategy, HybridShardStrategy, ShardingOptions
from lightning_shard.checkpoint.state import full_module_state
from tests.parity import assert_same
from tests.reference import computed_once
from tests.training import shared_path

BATCH, STEPS = 4, 6  # samples of a step on all replicas; batches, two to a step of the optimizers


class Scaled(nn.Module):
    """Has a scalar, which stays whole on each rank."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.conv = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x) * self.scale


def modules():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU()).double(), Scaled().double()


def optimizers(net, head):
    return torch.optim.AdamW(net.parameters(), 0.01), torch.optim.SGD(
        head.parameters(), 0.1, momentum=0.9
    )


def loader(size):
    data = torch.randn(BATCH * STEPS, 1, 9, 7, generator=torch.Generator().manual_seed(1))
    return DataLoader(data.double(), size, shuffle=True)


def loss_of(net, head, batch):
    return (head(net(batch)) - batch).square().mean()


def train_plainly(net, head, opts, batches):
    losses, norms = [], []
    for number, batch in enumerate(batches, 1):
        loss = loss_of(net, head, batch)
        (loss / 2).backward()
        losses.append(loss.detach())
        if number % 2 == 0:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05))
            nn.utils.clip_grad_value_(head.parameters(), 0.02)
            for opt in opts:
                opt.step()
                opt.zero_grad()
    return losses, norms


@computed_once
def alone(epochs):
    """Return losses, norms and weights of a loop of one process without Fabric."""
    net, head = modules()
    opts = optimizers(net, head)
    torch.manual_seed(5)
    losses, norms = [], []
    for _ in range(epochs):
        for all_of, new in zip(
            (losses, norms), train_plainly(net, head, opts, loader(BATCH)), strict=True
        ):
            all_of += new
    return losses, norms, net.state_dict(), head.state_dict()


class Double(DoublePrecision):
    """Leaves results in float64, which Fabric's own casts to float32."""

    def convert_output(self, data):
        return data


def fabric_of(strategy, *plugins, **options):
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy,
        plugins=[TorchElasticEnvironment(), *plugins], **options,
    )  # fmt: skip
    fabric.launch()
    return fabric


def set_up(domain, sharding="full"):
    """Set up one module with its optimizer, and the other before its optimizer is made."""
    fabric = fabric_of(FabricShardStrategy(domain_parallel_size=domain, sharding=sharding))
    net, head = modules()
    first, _ = optimizers(net, head)
    net, first = fabric.setup(net, first)
    head = fabric.setup_module(head)
    second = fabric.setup_optimizers(optimizers(net, head)[1])
    return SimpleNamespace(fabric=fabric, net=net, head=head, first=first, second=second)


def train(run):
    fabric, net, head = run.fabric, run.net, run.head
    losses, norms = [], []
    replicas = fabric.strategy.replicas
    for number, batch in enumerate(fabric.setup_dataloaders(loader(BATCH // replicas)), 1):
        with (
            fabric.no_backward_sync(net, enabled=number % 2 == 1),
            fabric.no_backward_sync(head, enabled=number % 2 == 1),
        ):
            loss = loss_of(net, head, batch)
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()))
        if number % 2 == 0:
            loss_of(net, head, batch)  # gathers parameters that the step is about to change
            norms.append(fabric.clip_gradients(net, run.first, max_norm=0.05))
            fabric.clip_gradients(head, run.second, clip_val=0.02)
            for opt in (run.first, run.second):
                opt.step()
                opt.zero_grad()
    return losses, norms


def assert_equal(run, losses, norms, expected):
    assert_same(torch.stack(losses), torch.stack(expected[0][-STEPS:]))
    assert_same(torch.stack(norms), torch.stack(expected[1][-STEPS // 2 :]))
    for module, weights in ((run.net, expected[2]), (run.head, expected[3])):
        found = full_module_state(module.module)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert_same(found[name], value)


def check(domain, other, **options):
    """Train an epoch, save, and train another on another mesh."""
    run = set_up(domain, **options)
    torch.manual_seed(5)
    assert_equal(run, *train(run), alone(1))
    state = {"net": run.net, "first": run.first, "second": run.second, "epoch": 1}
    path = shared_path("state.ckpt")
    run.fabric.save(path, state | {"head": run.head, "random": torch.get_rng_state()})
    numbers = torch.get_rng_state()
    run = set_up(other)
    state = {"net": run.net, "first": run.first, "second": run.second, "epoch": 0}
    rest = run.fabric.load(path, state | {"head": run.head}, strict=True)
    assert torch.equal(rest["random"], numbers)
    torch.set_rng_state(numbers)
    assert_equal(run, *train(run), alone(2))

    net, head = modules()  # the file is that of one process
    opts, saved = optimizers(net, head), torch.load(path, weights_only=True)
    for thing, name in zip((net, head, *opts), ("net", "head", "first", "second"), strict=True):
        thing.load_state_dict(saved[name])
    torch.set_rng_state(numbers)
    assert_same(torch.stack(train_plainly(net, head, opts, loader(BATCH))[0]),
                torch.stack(alone(2)[0][-STEPS:]))  # fmt: skip


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize(("domain", "other"), [(1, 2), (2, 1)])
def test_two_ranks(domain, other):
    check(domain, other)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("sharding", ["full", "gradients"])
def test_two_by_two(sharding):
    check(2, (2, 2), sharding=sharding)


@pytest.mark.spmd(4)
def test_collectives_count_samples_once():
    fabric = fabric_of("hybrid_shard")
    assert type(fabric.strategy).__name__ == "FabricShardStrategy"
    fabric = fabric_of(FabricShardStrategy(domain_parallel_size=2))
    replica = fabric.strategy.distributed_sampler_kwargs or fabric.global_rank // 2
    mine = torch.tensor([1.0 + replica])
    assert fabric.all_reduce(mine.clone(), reduce_op="sum").item() == 3
    assert fabric.all_reduce(mine.clone()).item() == 1.5
    assert fabric.all_gather(mine).tolist() == [[1], [2]]
    assert fabric.broadcast(fabric.global_rank, src=3) == 3
    fabric.barrier()
    batch = next(iter(fabric.setup_dataloaders(DataLoader(torch.randn(4, 1, 6, 5), 2))))
    gathered = fabric.all_gather(batch)
    assert isinstance(gathered, lightning_shard.DomainTensor)
    assert gathered.shape == (2, 2, 1, 6, 5)
    mine = lightning_shard.gather(batch)
    assert torch.equal(lightning_shard.gather(gathered)[replica], mine)


@pytest.mark.spmd(2)
def test_batches_of_a_batch_sampler_are_divided():
    fabric = fabric_of(FabricShardStrategy())
    given = DataLoader(range(8), batch_sampler=BatchSampler(range(7, -1, -1), 2, False))
    read = torch.stack(list(fabric.setup_dataloaders(given)))
    assert fabric.all_gather(read).tolist() == [[[7, 5], [3, 1]], [[6, 4], [2, 0]]]


@pytest.mark.spmd(2)
def test_a_module_without_memory_begins_as_in_one_process():
    fabric = fabric_of(FabricShardStrategy(domain_parallel_size=2))
    with fabric.init_module(empty_init=True):
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3))
    assert all(p.is_meta for p in net.parameters())
    torch.manual_seed(2)
    found = full_module_state(fabric.setup(net).module)
    torch.manual_seed(2)
    expected = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3)).state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.quick_rows("bf16-mixed")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_precisions(precision):
    def losses(fabric):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1))
        net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        data = torch.randn(6, 1, 9, 7, generator=torch.Generator().manual_seed(1))
        for batch in fabric.setup_dataloaders(DataLoader(data, 2)):
            loss = (net(batch) - 1).square().mean()
            fabric.backward(loss)
            opt.step()
            opt.zero_grad()
            yield loss.item()

    one = Fabric(accelerator="cpu", devices=1, precision=precision,
                 plugins=[LightningEnvironment()])  # fmt: skip
    split = fabric_of(FabricShardStrategy(domain_parallel_size=2), precision=precision)
    expected = list(losses(one))
    tolerance = 1e-5 if precision == "32-true" else 1e-2
    assert list(losses(split)) == pytest.approx(expected, rel=tolerance)


class Coder(nn.Module):
    """Is used by two methods of its own, one of which calls a part of a part."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 1))
        self.head = nn.Conv2d(4, 1, 1)

    def encode(self, x):
        return self.net[:2](x)

    def decode(self, x):
        return self.head(self.net[2](x)) * self.head.weight.sum()


def steps_of_coder(net, opt, batches, backward):
    for batch in batches:
        loss = (net.decode(net.encode(batch)) - batch).square().mean()
        backward(loss)
        opt.step()
        opt.zero_grad()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_methods_that_are_marked_as_forward_methods(sharding):
    torch.manual_seed(0)
    alone = Coder().double()
    torch.manual_seed(0)
    net = Coder().double()
    torch.manual_seed(5)
    steps_of_coder(
        alone, torch.optim.Adam(alone.parameters(), 0.1), loader(BATCH), torch.Tensor.backward
    )
    torch.manual_seed(5)
    fabric = fabric_of(FabricShardStrategy(domain_parallel_size=2, sharding=sharding))
    net, opt = fabric.setup(net, torch.optim.Adam(net.parameters(), 0.1))
    net.mark_forward_method("encode")
    net.mark_forward_method("decode")
    steps_of_coder(net, opt, fabric.setup_dataloaders(loader(BATCH)), fabric.backward)
    found = full_module_state(net.module)
    for name, value in alone.state_dict().items():
        assert_same(found[name], value)


class Trained(LightningModule):
    """Its steps are marked by some programs, though Fabric knows them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Conv2d(1, 1, 3, padding=1).double()

    def training_step(self, batch, index):
        return self.validation_step(batch, index)

    def validation_step(self, batch, index):
        return (self.net(batch) - batch).square().mean()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["full", "none"])
def test_steps_can_be_marked(sharding):
    alone, batch = Trained(), next(iter(loader(BATCH)))
    fabric = fabric_of(FabricShardStrategy(domain_parallel_size=2, sharding=sharding))
    net = Trained()
    module, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    module.mark_forward_method("validation_step")
    module.mark_forward_method(net.training_step)
    split = lightning_shard.shard(batch, fabric.strategy.domain_mesh, 2)
    with torch.no_grad():
        assert_same(module.validation_step(split, 0), alone.validation_step(batch, 0))
    fabric.backward(module.training_step(split, 0))


def options_of(**options):
    return {"accelerator": "cpu", "devices": 1, "strategy": FabricShardStrategy(**options)}


@pytest.mark.spmd(1)
def test_what_is_refused():
    with pytest.raises(ValueError, match="use checkpoint_format='single'"):
        Fabric(**options_of(checkpoint_format="sharded"))

    with pytest.raises(ValueError, match="Fabric takes FabricShardStrategy"):
        Fabric(accelerator="cpu", devices=1, strategy=HybridShardStrategy())
    fabric = fabric_of(FabricShardStrategy())
    with pytest.raises(ValueError, match=r"lightning\.pytorch\.strategies"):
        Trainer(strategy=fabric.strategy, accelerator="cpu", devices=1)
    net, head = modules()
    first, second = optimizers(net, head)
    with pytest.raises(RuntimeError, match=r"fabric\.setup has or is given"):
        fabric.setup(net, second)
    net(torch.randn(1, 1, 5, 5).double()).mean().backward()
    first.step()
    with pytest.raises(RuntimeError, match=r"with fabric\.load"):
        fabric.setup(net, first)
    spectral = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    half = fabric_of(FabricShardStrategy(sharding=ShardingOptions("none")), precision="bf16-true")
    with pytest.raises(ValueError, match="drop the imaginary part"):
        half.setup(spectral)


TOKENS, LITGPT_STEPS = 16, 3
needs_litgpt = pytest.mark.skipif(find_spec("litgpt") is None, reason="litgpt is not installed")


def pretrain(fabric, replicas, folder):
    """Run the pretraining of litgpt, all by its own functions, on random tokens."""
    from litgpt import pretrain as litgpt
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule

    class Tokens(DataModule):
        def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
            self.batch_size = batch_size

        def train_dataloader(self):
            numbers = torch.Generator().manual_seed(3)
            tokens = torch.randint(50, (BATCH * 4, TOKENS + 1), generator=numbers)
            return DataLoader(tokens, self.batch_size, shuffle=True)

        val_dataloader = train_dataloader

    config = Config(
        block_size=TOKENS, n_layer=2, n_embd=16, n_head=2, padded_vocab_size=50, vocab_size=50,
        norm_class_name="LayerNorm", mlp_class_name="LLaMAMLP", intermediate_size=24, bias=False,
    )  # fmt: skip
    size = BATCH // replicas
    steps = TrainArgs(
        global_batch_size=BATCH, micro_batch_size=size, max_norm=0.5, lr_warmup_steps=1,
        max_tokens=LITGPT_STEPS * size * TOKENS * fabric.world_size, save_interval=None,
    )  # fmt: skip
    with (
        mock.patch("torch.compile", lambda module: module),
        mock.patch.object(litgpt, "save_hyperparameters"),
    ):
        litgpt.main(
            fabric=fabric, devices=replicas, seed=1, initial_checkpoint_dir=None, resume=False,
            config=config, data=Tokens(), out_dir=folder, tokenizer_dir=None, tokenizer=None,
            train=steps, eval=EvalArgs(interval=100, max_iters=1), optimizer="AdamW",
        )  # fmt: skip
    saved = torch.load(folder / "final" / "lit_model.pth", weights_only=False)
    return saved["model"], saved["step_count"]


@computed_once
def pretrained_alone():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment(), Double()])
    # it would wait for the other ranks of the pool, of which one computes this
    alone_here = mock.patch.object(Fabric, "rank_zero_first", nullcontext)
    with alone_here, tempfile.TemporaryDirectory() as folder:
        return pretrain(fabric, 1, Path(folder))


def check_litgpt(domain, shard_dims):
    strategy = FabricShardStrategy(domain_parallel_size=domain, shard_dims=shard_dims)
    fabric = fabric_of(strategy, Double())
    found, steps = pretrain(fabric, strategy.replicas, shared_path("out"))
    expected, alone_steps = pretrained_alone()
    assert steps == alone_steps == LITGPT_STEPS
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value)


@needs_litgpt
@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [1, 2])
def test_pretraining_of_litgpt(domain):
    check_litgpt(domain, {"0": 1})


@needs_litgpt
@pytest.mark.slow
@pytest.mark.spmd(4)
def test_pretraining_of_litgpt_two_by_two():
    check_litgpt(2, {"0": 1})
