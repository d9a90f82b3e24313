"""Factorized spectral weights: own modes of small ones, own terms of large ones."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from neuralop.models import FNO
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_shard
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.memory.neuralop import factorized
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.processes.mesh import make_mesh
from lightning_shard.trainer.profile.traffic import counted
from tests.double_fno import to_double
from tests.pairs import choose
from tests.parity import assert_parity_of_module, assert_same, mesh_of

KINDS = ("tucker", "cp", "tt")
HOW = ("factorized", "reconstructed")


class Net(nn.Module):
    """FSDP2 warns of a root whose output is a view."""

    def __init__(self, kind, how="factorized", **options):
        super().__init__()
        torch.manual_seed(2)
        options = {"factorization": kind, "implementation": how, "rank": 0.6, **options}
        self.fno = to_double(FNO((7, 6), 1, 1, 5, n_layers=2, **options))

    def forward(self, x):
        return 2 * self.fno(x)


@pytest.mark.quick_rows("tucker-(4,)-factorized")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(("kind", "sizes", "how"), choose(KINDS, [(4,), (2, 2)], HOW), ids=str)
def test_own_modes(kind, how, sizes):
    """One rank has none of the 4 modes of the last dim, in uneven parts."""
    net = Net(kind, how)
    avoid_whole_fields(net)
    for dims in ((2, 3), (3, 2)):
        assert_parity_of_module(net, (2, 1, 21, 16), dims[: len(sizes)], mesh_of(*sizes))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", KINDS)
def test_own_modes_of_separable_weights(kind):
    net = Net(kind, separable=True)
    avoid_whole_fields(net)
    assert_parity_of_module(net, (2, 1, 21, 16), (2,), mesh_of(2))


def split_net(kind, how, domain, **options):
    """A parallelized network whose weights count as large, and the plain one."""
    net = Net(kind, how, **options)
    plain = copy.deepcopy(net)
    replicas = dist.get_world_size() // math.prod(domain)
    mesh = make_mesh("cpu", replicas, domain)
    with mock.patch("lightning_shard.fsdp.split_weights.travels_less", return_value=True):
        lightning_shard.parallelize(net, mesh)
    return net, plain, mesh


def assert_same_gradients(net, plain):
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in net.named_parameters():
        gradient, value = p.grad.full_tensor(), wanted[name]
        gradient = torch.view_as_complex(gradient) if value.is_complex() else gradient
        assert_same(gradient, value, name)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("kind", "domain", "how"), choose(KINDS, [(4,), (2,), (2, 2)], HOW), ids=str
)
def test_own_terms(kind, how, domain):
    """Split along the dims of the fields, along another one, and not at all."""
    net, plain, mesh = split_net(kind, how, domain)
    weight = net.fno.fno_blocks.convs[0].weight
    large = max(weight.parameters(), key=lambda p: p.numel())
    assert isinstance(large, DTensor)
    assert large.to_local().numel() < 1 + large.numel() / 2
    names = mesh.mesh_dim_names[1:]
    x = torch.randn(4, 1, 13, 10, dtype=torch.float64)
    mine = x.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    expected = plain(x).square().mean()
    expected.backward()
    for dims in (range(2, 2 + len(domain)), range(3, 3 - len(domain), -1), None):
        net.zero_grad()
        given = mine if dims is None else lightning_shard.shard(mine, mesh[names], dims)
        loss = net(given).square().mean()
        total = loss.detach() / 4
        dist.all_reduce(total)
        assert_same(total, expected.detach())
        loss.backward()
        assert_same_gradients(net, plain)


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize("kind", choose(KINDS, fast=["tucker"]))
def test_own_terms_in_a_state_dict(kind):
    """The names and shapes of the plain network; it loads again."""
    net, plain, _ = split_net(kind, "factorized", (2,))
    state, wanted = full_module_state(net), plain.state_dict()
    names = [name for name in wanted if not name.endswith("_metadata")]
    for name in names:
        assert_same(state[name], wanted[name], name)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    net.load_state_dict({name: wanted[name] for name in names}, strict=False)
    state = full_module_state(net)
    for name in names:
        assert_same(state[name], wanted[name], name)


@pytest.mark.quick_rows("cp")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_do_not_depend_on_the_terms(kind):
    """Modes travel, factors do not."""
    sent = []
    for rank in (0.5, 1.0):
        net, _, mesh = split_net(kind, "factorized", (2,), rank=rank)
        x = lightning_shard.shard(torch.randn(1, 1, 16, 12).double(), mesh["domain"], 2)
        with counted() as traffic:
            net(x).square().mean().backward()
        sent.append(traffic.bytes)
    assert sent[0] == sent[1] > 0


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("kind", "precision", "large"), choose(KINDS, ["half", "mixed"], [False, True], fast=2)
)
def test_modes_in_half_precision(kind, precision, large):
    torch.manual_seed(2)
    net = FNO((6, 6), 1, 1, 8, n_layers=1, factorization=kind, implementation="factorized")
    plain, x = copy.deepcopy(net), torch.randn(1, 1, 16, 16)
    net.fno_blocks.convs[0].fno_block_precision = precision
    mesh = make_mesh("cpu", 1, (2,))
    with mock.patch("lightning_shard.fsdp.split_weights.travels_less", return_value=large):
        lightning_shard.parallelize(net, mesh)
    found = net(lightning_shard.shard(x, mesh["domain"], 2))
    wanted = plain(x)
    error = (lightning_shard.gather(found) - wanted).norm() / wanted.norm()
    assert error.item() < 5e-3


def test_large_weights_are_split_and_small_ones_not():
    def weight(kind, channels, modes, rank):
        net = FNO((modes, modes), 1, 1, channels, n_layers=1, factorization=kind, rank=rank)
        return net.fno_blocks.convs[0].weight

    for kind in KINDS:
        assert factorized.travels_less(weight(kind, 64, 32, 0.42), "cpu")
        assert not factorized.travels_less(weight(kind, 16, 16, 0.1), "cpu")
        assert not factorized.travels_less(weight(kind, 32, 16, 0.1), "cuda")
