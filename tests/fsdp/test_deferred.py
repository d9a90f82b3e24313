"""Modules of the meta device: the weights of a build on a real one, or of a file, part by part."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.fsdp import materialize
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.fsdp.network import (
    Block,
    assert_equal_runs,
    loader,
    net,
    train_alone,
    train_sharded,
)
from tests.pairs import choose
from tests.training import dense_fno, trainer
from tests.training import loader as loader_of

SHARDINGS = [
    {},
    {"sharding": "none"},
    {"sharding": "hybrid", "shard_size": 2},
    {"wrap": ["Block"], "ignored_parameters": ["*.norm.*"], "cpu_offload": True},
]


def state_of(module):
    """Copies, since training goes on."""
    return {name: value.clone() for name, value in full_module_state(module).items()}


class Bare(nn.Module):
    """Parameters of its own: a scalar, a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(()))
        self.phase = nn.Parameter(torch.empty(5, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 1.5)
        nn.init.normal_(self.phase.real)
        nn.init.normal_(self.phase.imag)

    def forward(self, x):
        return self.gain * self.phase.abs().sum() * x


class Outer(nn.Module):
    """Its reset changes what a part of it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.inner = nn.Conv2d(6, 6, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        nn.init.uniform_(self.inner.weight, -0.3, 0.3)

    def forward(self, x):
        return self.scale * self.inner(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.outer = Outer()
        self.norm = nn.BatchNorm2d(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.again = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.again.weight = self.blocks[1].conv.weight
        self.bare = Bare()
        self.head = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.outer(x)) + self.again(x)
        return self.head(self.bare(x)) + self.attention.out_proj.bias.sum()


class Deferred(LightningModule):
    """Builds its network in `configure_model`, on the device that is asked for."""

    def __init__(self, make=Network, device="meta") -> None:
        super().__init__()
        self.make, self.where = make, device

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            with torch.device(self.where):
                self.network = self.make()

    def training_step(self, batch, batch_idx):
        return (self.network(batch[:, :1]) - batch[:, 1:]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@pytest.mark.quick_rows("{'sharding': 'hybrid', 'shard_size': 2}-(1,)")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(("options", "domain"), choose(SHARDINGS, [(1,), (2,)]), ids=str)
def test_the_weights_of_a_build_on_the_device(options, domain):
    """Bit for bit, whatever the other ranks would have drawn."""
    torch.manual_seed(5)
    wanted = Network().state_dict()
    torch.manual_seed(5 + dist.get_rank())
    module, first = Deferred(), {}
    module.on_train_start = lambda: first.update(state_of(module))
    losses, _ = train_sharded(domain, options, module, torch.float32, limit_train_batches=2)
    assert all(torch.tensor(losses).isfinite())
    assert {k.removeprefix("network."): v.shape for k, v in first.items()} == {
        k: v.shape for k, v in wanted.items()
    }
    for key, value in wanted.items():
        assert torch.equal(first[f"network.{key}"], value), key


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_trains_as_the_built_one():
    """In float64, so that it is the same network and not only the same start."""
    runs = []
    for device in ("meta", "cpu"):
        torch.manual_seed(5)
        runs.append(train_sharded((2,), {"wrap": ["Block"]}, Deferred(device=device),
                                  precision="64-true"))  # fmt: skip
    assert_equal_runs(*runs, tolerance=1e-12)


@pytest.mark.spmd(2)
def test_init_module_of_the_trainer():
    """Lightning's own way to say it."""
    runner = trainer((1,), strategy={"wrap": ["Block"]}, max_steps=1)
    with runner.init_module(empty_init=True):
        module = net_without_more()
    assert all(p.is_meta for p in module.parameters())
    runner.fit(module, loader(4, torch.float32))
    assert isinstance(module.network.stem.weight, DTensor)
    assert all(v.isfinite().all() for v in full_module_state(module).values())


def net_without_more():
    module = Deferred(device="meta")
    module.configure_model()
    return module


@pytest.mark.spmd(2)
def test_a_rank_never_holds_much_more_than_its_part():
    """The largest module whole, beside the shards."""
    sizes, original = [], materialize._whole

    def counting(p, *args, **kwargs):
        sizes.append(p.numel())
        return original(p, *args, **kwargs)

    materialize._whole = counting
    try:
        train_sharded((1,), {}, Deferred(), torch.float32, limit_train_batches=1)
    finally:
        materialize._whole = original
    assert max(sizes) == 6 * 6 * 9


@pytest.mark.spmd(2)
def test_modules_without_reset_are_named():
    with pytest.raises(ValueError, match=r"no reset_parameters\(\).*: network.0 .Rotary.*init_wei"):
        train_sharded((1,), {}, Deferred(lambda: nn.Sequential(Rotary(), nn.Conv2d(1, 1, 1))))


class Rotary(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return x * self.angles.sum()


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(("kind", "device"), choose(["pt", "safetensors"], ["cpu", "meta"]))
def test_begins_with_a_file(kind, device):
    """For each submodule its own, also where the file holds complex weights that are split."""
    torch.manual_seed(5)
    source = dense_fno()
    source.configure_model()
    path = shared_path(f"weights.{kind}")
    state = {k: v for k, v in source.network.state_dict().items() if k != "_metadata"}
    if dist.get_rank() == 0:
        if kind == "pt":
            torch.save(state, path)
        else:
            save_file({k: v.contiguous() for k, v in state.items()}, path)
    dist.barrier()
    torch.manual_seed(6)
    with torch.device(device):
        module = dense_fno()
        module.configure_model()
    runner = trainer((2,), strategy={"init_weights_from": {"network": str(path)}}, max_steps=1)
    first = {}
    module.on_train_start = lambda: first.update(state_of(module))
    runner.fit(module, loader_of("dense_fno", torch.float32, 2, 8))
    for key, value in state.items():
        assert torch.equal(first[f"network.{key}"], value), key
    second = state_of(module)  # a second fit goes on
    again = trainer((2,), strategy={"init_weights_from": {"network": str(path)}}, max_steps=1)
    first.clear()
    again.fit(module, loader_of("dense_fno", torch.float32, 2, 8))
    assert all(torch.equal(first[k], v) for k, v in second.items())


@pytest.mark.quick_rows("2x1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
def test_resumes_from_a_checkpoint(domain):
    """It is loaded once there is memory for it."""
    path = shared_path("deferred.ckpt")
    torch.manual_seed(5)
    module = Deferred()
    runner = trainer(domain, max_steps=2)
    runner.fit(module, loader(4, torch.float32))
    runner.save_checkpoint(path)
    wanted = state_of(module)
    torch.manual_seed(6)
    resumed, first = Deferred(), {}
    resumed.on_train_start = lambda: first.update(state_of(resumed))
    trainer(domain, max_steps=3, max_epochs=2).fit(
        resumed, loader(4, torch.float32), ckpt_path=path
    )
    assert all(torch.equal(first[k], v) for k, v in wanted.items())


@pytest.mark.quick_rows("1")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("seed", [None, 1])
def test_ranks_begin_alike_whatever_they_seed(seed):
    """Weights and buffers of the first rank go to all."""
    torch.manual_seed(3 if dist.get_rank() == 0 else 77)
    module = net(seed=3 if dist.get_rank() == 0 else 77)
    if seed is not None:
        torch.manual_seed(seed + dist.get_rank())
    assert_equal_runs(train_sharded((1,), {}, module), train_alone())
