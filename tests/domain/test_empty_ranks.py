"""On ranks without rows, gradients of parameters arrive in the order of the other ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.ops import DeformConv2d

from lightning_shard import gather, shard
from tests.parity import assert_same, mesh_of


class Deformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset, self.conv = nn.Conv2d(4, 18, 3, padding=1), DeformConv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x, self.offset(x))


ROW, SEQUENCE = (2, 4, 1, 5), (3, 1, 4)
LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 3, 1), (1, 4, 1), 2),
    "conv2d": (lambda: nn.Conv2d(4, 3, 1), ROW, 2),
    "conv2d with neighbours": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), ROW, 2),
    "conv3d": (lambda: nn.Conv3d(4, 3, 3, padding=1), (1, 4, 1, 2, 3), 2),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 3, 3, padding=1), ROW, 2),
    "deformable": (Deformed, ROW, 2),
    "linear": (lambda: nn.Linear(4, 3), SEQUENCE, 1),
    "batch_norm": (lambda: nn.BatchNorm2d(4), ROW, 2),
    "batch_norm, evaluated": (lambda: nn.BatchNorm2d(4).eval(), ROW, 2),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), ROW, 2),
    "group_norm": (lambda: nn.GroupNorm(2, 4), ROW, 2),
    "layer_norm": (lambda: nn.LayerNorm(4), SEQUENCE, 1),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), SEQUENCE, 1),
    "gru": (lambda: nn.GRU(4, 3, 2, bidirectional=True), SEQUENCE, 1),
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), (1, 3, 4), 0),
    "gru_cell": (lambda: nn.GRUCell(4, 3), (1, 4), 0),
    "lstm_cell": (lambda: nn.LSTMCell(4, 3), (1, 4), 0),
    "prelu": (lambda: nn.PReLU(4), ROW, 2),
}  # fmt: skip


def gradients(make, shape, given, reduced):
    torch.manual_seed(0)
    layer, arrived = make().double(), []
    x = torch.randn(shape, dtype=torch.float64)

    def hook(p):
        if reduced:
            dist.all_reduce(p.grad)  # meets that of another parameter where orders differ
        arrived.append(p.shape)

    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(hook)
    result = layer(given(x))
    result = result[0] if isinstance(result, tuple) else result
    result.sin().sum().backward()
    return arrived, [p.grad for p in layer.parameters()]


def check(name):
    make, shape, dim = LAYERS[name]
    expected = gradients(make, shape, lambda x: x, reduced=False)[1]
    arrived, found = gradients(make, shape, lambda x: shard(x, mesh_of(2), dim), reduced=True)
    orders = [None, None]
    dist.all_gather_object(orders, arrived)
    assert orders[0] == orders[1]
    for mine, one in zip(found, expected, strict=True):
        assert_same(mine / 2, one)


def test_hooks_of_parameters_may_communicate(run_each):
    run_each(2, check, {name: {"name": name} for name in LAYERS})


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[2:])


TWICE = {name: LAYERS[name] for name in LAYERS if name not in ("deformable", "attention")} | {
    "max_pool2d": (lambda: nn.MaxPool2d(3, 1, 1), ROW, 2),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d(1), ROW, 2),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, 1, 1), ROW, 2),
    "upsampled": (lambda: nn.Upsample(scale_factor=1, mode="bilinear"), ROW, 2),
    "reflected": (lambda: nn.ReflectionPad2d((1, 1, 0, 0)), ROW, 2),
    "repeated": (lambda: nn.ReplicationPad2d(1), ROW, 2),
    "around": (lambda: nn.CircularPad2d((1, 1, 0, 0)), ROW, 2),
    "local_response_norm": (lambda: nn.LocalResponseNorm(3), (2, 1, 4, 5), 1),
    "softmax": (lambda: nn.Softmax(2), ROW, 2),
    "fourier": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Fourier()), ROW, 2),
}  # fmt: skip


def second_gradients(make, shape, given):
    """The gradients of a penalty of a loss that is linear in what the layer gives."""
    torch.manual_seed(0)
    layer = make().double()
    x = given(torch.randn(shape, dtype=torch.float64)).requires_grad_()
    result = layer(x)
    result = result[0] if isinstance(result, tuple) else result
    (first,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    wanted = [x, *layer.parameters()]
    if not first.requires_grad:
        return [torch.zeros_like(each) for each in wanted]
    penalty = first.square().sum()
    return torch.autograd.grad(penalty, wanted, allow_unused=True, materialize_grads=True)


def check_twice(name):
    """Its second derivatives call the same collectives on the rank without rows."""
    make, shape, dim = TWICE[name]
    expected = second_gradients(make, shape, lambda x: x)
    of_rows, *found = second_gradients(make, shape, lambda x: shard(x, mesh_of(2), dim))
    assert_same(gather(of_rows), expected[0])
    for mine, one in zip(found, expected[1:], strict=True):
        dist.all_reduce(mine)
        assert_same(mine / 2, one)


def test_second_derivatives(run_each):
    run_each(2, check_twice, {name: {"name": name} for name in TWICE})


INTEGERS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "indices": lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[0],
    "reflected": lambda x: F.pad(x, (1, 1, 0, 0), "reflect"),
}


def check_integers(name):
    x = torch.randint(0, 200, ROW, dtype=torch.uint8)
    expected, split = INTEGERS[name](x), INTEGERS[name](shard(x, mesh_of(2), 2))
    assert split.dtype == split.to_local().dtype == torch.uint8
    assert torch.equal(gather(split), expected)
    assert split.sum() == expected.sum()


def test_integers_stay_integers(run_each):
    """Else ranks would add up numbers of two dtypes."""
    run_each(2, check_integers, {name: {"name": name} for name in INTEGERS})
