"""`split_inputs`: calls with whole tensors give what one process gives; each rank has a part."""

import copy
import re
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_shard
from lightning_shard import DisagreementError, DomainTensor, ShardingOptions, split_inputs
from tests.parity import mesh_of


@dataclass
class Output:
    image: Tensor
    extra: tuple[Tensor, int]


class Coder(nn.Module):
    """Encodes and decodes, as image coders do, and notes what its convolutions were given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.Conv2d(8, 3, 3, padding=1)
        self.double()
        self.seen = []

    def encode(self, x, *, scale=1.0):
        self.seen.append(x)
        return F.silu(self.norm(self.down(x))) * scale

    def decode(self, z, shift=None):
        self.seen.append(z)
        image = self.up(F.interpolate(z, scale_factor=2))
        return Output(image if shift is None else image + shift, (z.mean((2, 3)), 7))

    def forward(self, x):
        return self.decode(self.encode(x)).image


def image(rows=11, columns=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, rows, columns, generator=generator, dtype=torch.float64)


def same(found, expected):
    assert not isinstance(found, DomainTensor)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_call_takes_and_gives_whole_tensors_while_each_rank_computes_a_part(without):
    net = Coder()
    with without():
        expected = net(image())
        net.seen.clear()
        with split_inputs(net, mesh_of(3)):
            found = net(image())
    same(found, expected)
    rows = [x.to_local().shape[2] for x in net.seen]
    assert rows == [len(torch.arange(n).tensor_split(3)[dist.get_rank()]) for n in (11, 6)]


@pytest.mark.spmd(4)
def test_two_dims_on_a_mesh_of_two_axes():
    net = Coder()
    with torch.no_grad(), split_inputs(net, mesh_of(2, 2)):
        found = net(image())
    same(found, net(image()).detach())


@pytest.mark.spmd(3)
def test_methods_dataclasses_and_arguments_by_name():
    net, x = Coder(), image()
    z = net.encode(x, scale=2.0).detach()
    shift = torch.randn(1, 3, 12, 10, dtype=torch.float64)
    shift = shift.mul(0).add(torch.arange(10.0))
    expected = net.decode(z, shift)
    dims = {"x": 3, "z": 3, "shift": 3}
    with torch.no_grad(), split_inputs(net, mesh_of(3), dims, methods=["encode", "decode"]):
        same(net.encode(x=x, scale=2.0), z)
        found = net.decode(z, shift=shift)
        same(net.decode(z).image, net.forward(image(12, 10)).mul(0) + net.decode(z).image)
    same(found.image, expected.image.detach())
    same(found.extra[0], expected.extra[0].detach())
    assert found.extra[1] == 7


@pytest.mark.spmd(2)
def test_a_method_that_calls_another_splits_once():
    net = Coder()
    with torch.no_grad(), split_inputs(net, mesh_of(2), methods=["forward", "encode", "decode"]):
        found = net(image())
    same(found, net(image()).detach())
    assert [isinstance(x, DomainTensor) for x in net.seen] == [True, True, False, False]


@pytest.mark.spmd(2)
def test_results_that_stay_split_go_on_into_the_next_module():
    net, after = Coder(), nn.Conv2d(3, 2, 3, padding=1).double()
    for p in after.parameters():
        dist.broadcast(p.data, 0)
    with torch.no_grad(), split_inputs(net, mesh_of(2), gather=False):
        middle = net(image())
        assert isinstance(middle, DomainTensor)
        with split_inputs(after, mesh_of(2)):
            found = after(middle)
    same(found, after(net(image())).detach())


@pytest.mark.spmd(2)
@pytest.mark.parametrize("mode", ["full", "gradients"])
def test_weights_may_be_sharded(mode):
    net = Coder()
    expected = net.decode(net.encode(image())).image.detach()
    mesh = mesh_of(2)
    methods = ["encode", "decode"]
    lightning_shard.parallelize(net, mesh, methods=methods, options=ShardingOptions(mode=mode))
    with torch.no_grad(), split_inputs(net, mesh, methods=methods):
        for _ in range(2):
            same(net.decode(net.encode(image())).image, expected)
    net.reshard()
    assert all(p.to_local().shape[0] == p.shape[0] // 2 for p in net.down.parameters())


@pytest.mark.spmd(2)
def test_gradients_are_partial_and_their_mean_is_the_gradient():
    net, single = Coder(), Coder()
    single(image()).square().mean().backward()
    with split_inputs(net, mesh_of(2)):
        net(image()).square().mean().backward()
    for p, q in zip(net.parameters(), single.parameters(), strict=True):
        dist.all_reduce(p.grad)
        same(p.grad / 2, q.grad)


@pytest.mark.spmd(2)
def test_a_neural_operator_as_it_is():
    from neuralop.models import TFNO

    torch.manual_seed(0)
    net = TFNO((4, 4), 1, 1, hidden_channels=6, n_layers=2)
    x = torch.randn(1, 1, 17, 12)
    with torch.inference_mode():
        expected = copy.deepcopy(net)(x)
        with split_inputs(net, mesh_of(2)):
            found = net(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.spmd(2)
def test_afterwards_the_module_is_as_before_also_when_a_call_raised():
    net = Coder()
    net.forward = mock.Mock(side_effect=ZeroDivisionError, __name__="forward")
    own = net.forward
    with pytest.raises(TypeError), split_inputs(net, mesh_of(2), methods=["encode", "forward"]):
        net.encode(image(), scale="large")
    assert net.forward is own
    assert "encode" not in vars(net)
    del net.forward
    with torch.no_grad(), split_inputs(net, mesh_of(2)):
        with pytest.raises(RuntimeError, match="channels"):
            net(image()[:, :2])
        same(net(image()), Coder()(image()).detach())


@pytest.mark.spmd(2)
def test_ranks_that_call_with_other_values_are_told():
    net = Coder()
    with split_inputs(net, mesh_of(2), methods=["encode"]):
        noise = image() + dist.get_rank()
        sentence = "the ranks [0, 1] share each call of encode, but gave different values for the"
        with pytest.raises(DisagreementError, match=re.escape(sentence) + " argument 'x'"):
            net.encode(noise)
        with pytest.raises(DisagreementError, match="argument 'scale'"):
            net.encode(image(), scale=float(dist.get_rank()))
        with pytest.raises(DisagreementError, match="argument 'scale'"):
            net.encode(image(), **({"scale": 2.0} if dist.get_rank() else {}))
    for name, value in {"shard_dims": 2 + dist.get_rank(), "gather": dist.get_rank() == 0}.items():
        with (
            split_inputs(net, mesh_of(2), methods=["encode"], **{name: value}),
            pytest.raises(DisagreementError, match=f"argument '{name}'"),
        ):
            net.encode(image())


@pytest.mark.spmd(2)
def test_wrong_words_are_refused():
    net, mesh = Coder(), mesh_of(2)
    with pytest.raises(ValueError, match="Coder has no method 'decod'; did you mean 'decode'"):
        split_inputs(net, mesh, methods=["decod"]).__enter__()
    names = re.escape("names the argument 'y', but forward take ['x']; use one of these.")
    with pytest.raises(ValueError, match=names):
        split_inputs(net, mesh, {"y": 2}).__enter__()
    with (
        split_inputs(net, mesh, methods=["decode"], shard_dims={"shift": 2}),
        pytest.raises(ValueError, match=r"no tensor in the call of decode was split.*\['z'\]"),
    ):
        net.decode(net.encode(image()))
    with split_inputs(net, mesh, 4), pytest.raises(ValueError, match="must lie in its shape"):
        net(image())


class Wrapped(nn.Module):
    def forward(self, *args, **kwargs):
        assert all(isinstance(x, DomainTensor) for x in (args[0], kwargs["b"]))
        assert not isinstance(args[1], DomainTensor)
        return {"sum": [args[0] + kwargs["b"], args[1]]}


@pytest.mark.spmd(2)
def test_arguments_without_names_go_by_their_position():
    net, x = Wrapped(), image()
    with split_inputs(net, mesh_of(2), {"0": 2, "b": 2}):
        found = net(x, x, b=2 * x)
    same(found["sum"][0], 3 * x)
    same(found["sum"][1], x)
