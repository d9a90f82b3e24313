"""neuraloperator's layers under `parallelize`: weights by mode, nothing of whole fields."""

import copy

import pytest
import torch
from neuralop.layers.embeddings import GridEmbeddingND
from neuralop.models import FNO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_shard
from benchmarks.gpu_speed import Launches
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.ops.spectral import cost
from lightning_shard.processes.mesh import make_mesh
from tests.double_fno import to_double
from tests.pairs import choose
from tests.parity import assert_parity_of_module, assert_same, mesh_of


class Scaled(nn.Module):
    """FSDP2 warns of a root whose output is a view."""

    def __init__(self, n_modes=(7, 6)):
        super().__init__()
        torch.manual_seed(2)
        self.fno = to_double(FNO(n_modes, 1, 1, hidden_channels=4, n_layers=2))

    def forward(self, x):
        return 2 * self.fno(x)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.numel = max(self.numel, result.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.spmd(4)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_values_are_those_of_the_layers(sizes):
    net = Scaled()
    avoid_whole_fields(net)
    assert_parity_of_module(net, (2, 1, 21, 16), (2, 3)[: len(sizes)], mesh_of(*sizes))


@pytest.mark.spmd(1)
@pytest.mark.parametrize("few", [0, 2**18], ids=["modes that are kept", "all modes"])
def test_one_process_has_the_numbers_of_the_layer(few, monkeypatch):
    """In the way of split fields and in that of small ones; torch.func finds the layer's own."""
    monkeypatch.setattr(cost, "FEW", few)
    torch.manual_seed(4)
    net, x = Scaled(), torch.randn(2, 1, 21, 16, dtype=torch.float64, requires_grad=True)
    fast = copy.deepcopy(net)
    lightning_shard.parallelize(fast, make_mesh("cpu", 1, (1,)))
    assert type(fast(x)) is torch.Tensor
    wanted = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
    found = torch.autograd.grad(fast(x).square().sum(), [x, *fast.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    tangent = torch.func.jvp(fast, (x,), (x,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(net, (x,), (x,))[1])


@pytest.mark.spmd(2)
def test_coordinates_follow_the_default_dtype():
    """The layer makes them in the default dtype, which a process may change between trainings."""
    x = torch.randn(1, 1, 7, 5, dtype=torch.float64)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            net = nn.Sequential(GridEmbeddingND(1, dim=2))
            wanted = net(x)
            avoid_whole_fields(net)
            assert_same(net(lightning_shard.shard(x, mesh_of(2), 2)), wanted)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.spmd(4)
def test_no_rank_allocates_a_whole_field():
    net, x = Scaled(), torch.randn(1, 1, 256, 64, dtype=torch.float64)
    avoid_whole_fields(net)
    split = lightning_shard.shard(x, mesh_of(4), 2)
    with Largest() as largest:
        net(split)
    hidden = 8 * split.to_local().numel()  # of the channel MLPs, which lift to 2 x 4 channels
    assert largest.numel <= hidden < 256 * 64 * 4


@pytest.mark.quick_rows("None-(2,)")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(("split", "dims"), choose([2, 3, None], [(2,), (3,)]), ids=str)
def test_weights_split_by_mode(dims, split):
    """Along the dim of the field or along another one, and where the field is whole."""
    mesh = make_mesh("cpu", 1, (4,))
    net, x = Scaled(), torch.randn(1, 1, 13, 10, dtype=torch.float64)
    plain = copy.deepcopy(net)
    lightning_shard.parallelize(net, mesh, dims=dims)
    weight = net.fno.fno_blocks.convs[0].weight._parameters["tensor"]
    assert weight.to_local().shape[dims[0]] <= {2: 2, 3: 1}[dims[0]]  # of 7 and of 4 modes
    given = x if split is None else lightning_shard.shard(x, mesh["domain"], split)
    loss = net(given).square().mean()
    expected = plain(x).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in net.named_parameters():
        gradient, value = p.grad.full_tensor(), wanted[name]
        if value.is_complex():
            gradient = torch.view_as_complex(gradient)
        scale = 1e-10 * float(value.abs().max())
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=scale)


@pytest.mark.spmd(4)
def test_fewer_modes_than_ranks_can_share():
    """6 modes in parts of 2: FSDP2 shards the weights over all ranks, as none may have nothing."""
    mesh = make_mesh("cpu", 1, (4,))
    net = Scaled(n_modes=(6, 6))
    plain, x = copy.deepcopy(net), torch.randn(1, 1, 13, 10, dtype=torch.float64)
    lightning_shard.parallelize(net, mesh)
    loss = net(lightning_shard.shard(x, mesh["domain"], 2)).square().mean()
    expected = plain(x).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    name = "fno.fno_blocks.convs.0.weight.tensor"
    gradient = torch.view_as_complex(net.get_parameter(name).grad.full_tensor())
    assert_same(gradient, plain.get_parameter(name).grad)


def test_a_network_is_prepared_once_for_each_fit_and_test():
    network = FNO((4, 4), 1, 1, 8, n_layers=1)
    before = list(map(type, network.modules()))
    avoid_whole_fields(network)
    once = list(map(type, network.modules()))
    avoid_whole_fields(network)
    assert list(map(type, network.modules())) == once != before


@pytest.mark.spmd(4)
def test_the_domain_may_have_another_name():
    """Weights are split by mode along the axis that is said to split samples."""
    mesh = lightning_shard.init_mesh({"data": 2, "spatial": 2})
    net, unaware = Scaled(), Scaled()
    lightning_shard.parallelize(net, mesh, domain="spatial")
    weight = net.fno.fno_blocks.convs[0].weight._parameters["tensor"]
    assert weight.device_mesh.mesh_dim_names == ("data", "spatial")
    with pytest.warns(UserWarning, match="domain='spatial'"):
        lightning_shard.parallelize(unaware, mesh)
    with pytest.raises(ValueError, match="no axis 'rows'"):
        lightning_shard.parallelize(Scaled(), mesh, domain="rows")
    x = torch.randn(1, 1, 13, 10, dtype=torch.float64)
    expected = Scaled()(x)
    for network in (net, unaware):
        found = network(lightning_shard.shard(x, mesh["spatial"], 2))
        assert_same(lightning_shard.gather(found), expected)


@pytest.mark.spmd(2)
def test_coordinates_come_from_the_cpu_once():
    """A copy from there in each step would stop the host, and a CUDA graph has none."""
    net, x = FNO((4, 4), 1, 1, 4), torch.randn(1, 1, 9, 8)
    avoid_whole_fields(net)
    field = lightning_shard.shard(x, mesh_of(2), 2)
    net(field)
    with Launches() as counted:
        net(field)
    assert "linspace" not in counted.seen
    assert not {"_to_copy", "lift_fresh"} & counted.seen.keys()
