"""Certificates: equal meshes, planted faults that are found and named, and what is written."""

import json
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridShardStrategy, certify
from lightning_shard.domain.halo import overlapping
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.ops.norm import batch_norm, normalize
from lightning_shard.ops.window import conv

window_rows = conv.window_rows
optimizer_step = HybridShardStrategy.optimizer_step


class Net(LightningModule):
    def __init__(self, middle: nn.Module = nn.GELU(), last: nn.Module = nn.Identity()):  # noqa: B008
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 1), middle, nn.Conv2d(4, 4, 3, padding=1))
        self.head, self.last = nn.Conv2d(4, 1, 1), last

    def training_step(self, batch, batch_idx):
        return self.last(self.head(torch.sin(self.body(batch)))).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(size=4, count=3):
    samples: Any = torch.randn(size * count, 1, 12, 10)  # a tensor serves as a dataset
    return DataLoader(samples, size)


def one_row_short(x, dim, output, **window):
    """The rows under the windows without the last one, where it came from another rank."""
    found = window_rows(x, dim, output, **window)
    _, high = found.layout.dims[dim][0].bounds(found.layout.grid)
    if window["kernel"] == 1 or high == output:
        return found
    rows = found.local.narrow(dim, 0, found.local.shape[dim] - 1)
    last = torch.zeros_like(found.local.narrow(dim, 0, 1))
    return Subdomain(torch.cat([rows, last], dim), found.layout, found.domain)


def a_step_too_far(strategy, optimizer, *args, **kwargs):
    found = optimizer_step(strategy, optimizer, *args, **kwargs)
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(1.01)
    return found


class HalfGradient(torch.autograd.Function):
    """Right in one process and wrong on ranks, in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] / 2


class Halved(nn.Module):
    def forward(self, x):
        return lightning_shard.local_map(HalfGradient.apply)(x) if is_split(x) else x


def is_split(x):
    return isinstance(x, lightning_shard.DomainTensor)


@pytest.mark.slow
def test_meshes_that_train_alike_are_certified(tmp_path):
    found = certify(Net(), batches(), steps=5, simulated=True, facts={"config": "abc"})
    assert found.is_equal, str(found)
    assert found.culprit is None
    shown = {(each.ranks, each.precision) for each in found.comparisons}
    assert shown == {(m, p) for m in ("1x1", "1x2", "2x2", "1x4") for p in ("64-true", "32-true")}
    doubles = [each for each in found.comparisons if each.precision == "64-true"]
    assert all(len(each.losses) == 5 and max(each.weights) < 1e-13 for each in doubles)
    page = found.save(tmp_path / "run")
    text = page.read_text()
    assert "the meshes 1x1, 1x2, 2x2, 1x4 equals training in one process, over 5 steps" in text
    assert f"| torch | {torch.__version__} |" in text
    assert "| config | abc |" in text
    told = json.loads(page.with_suffix(".json").read_text())
    assert told["is_equal"]
    assert len(told["comparisons"]) == 8


def test_a_halo_that_is_one_row_short_is_found_and_named():
    with mock.patch.object(conv, "window_rows", one_row_short), overlapping("never"):
        found = certify(Net(), batches(), [(1, 1), (1, 2)], steps=2, simulated=True)
    assert not found.is_equal
    assert found.comparisons[0].is_equal
    culprit = found.culprit
    assert culprit is not None
    assert (culprit.step, culprit.module, culprit.kind) == (0, "body.2", "Conv2d")
    assert culprit.function == "torch.conv2d"
    assert "step 0: torch.conv2d in module body.2 (Conv2d) is the first whose" in str(found)
    assert found.culprit_on == "1x2 in 64-true"


@pytest.mark.slow
def test_a_fault_in_the_step_itself_is_named_by_its_function():
    def wrong(self, batch, batch_idx):
        x = self.body(batch)
        loss = torch.cos(x).square().mean()
        return loss * (1 + 1e-3 * is_split(x))

    with mock.patch.object(Net, "training_step", wrong):
        found = certify(Net(), batches(), [(1, 2)], steps=1, simulated=True)
    assert found.culprit is not None
    assert (found.culprit.module, found.culprit.function) == ("", "Tensor.mul")


@pytest.mark.slow
def test_a_fault_in_backward_is_named():
    found = certify(Net(Halved()), batches(), [(1, 2)], steps=1, simulated=True)
    assert found.culprit is not None
    assert found.culprit.backward
    assert found.culprit.module == "body.0"
    assert "all outputs agree, and gradients differ from module body.0 (Conv2d) on" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "fault", "sentence"),
    [
        (normalize.Groups, "combined", lambda _, own: own,
         "torch.nn.functional.batch_norm in module body.1 (BatchNorm2d) is the first whose output"),
        (batch_norm, "volume", lambda *_: 3,
         "all outputs and gradients agree, and the buffer running_var of module body.1 (B"),
        (HybridShardStrategy, "optimizer_step", a_step_too_far,
         "all outputs and gradients agree, and weights differ after the optimizer's step"),
    ],
)  # fmt: skip
def test_faults_of_a_norm_and_of_the_optimizer_are_named(place, name, fault, sentence):
    with mock.patch.object(place, name, fault):
        found = certify(Net(nn.BatchNorm2d(4)), batches(), [(1, 2)], steps=2, simulated=True)
    assert f"step 0: {sentence}" in str(found)


@pytest.mark.slow
def test_statistics_of_a_share_of_a_batch_differ_and_are_named():
    net = Net(nn.BatchNorm2d(4))
    found = certify(net, batches(), [(1, 2), (2, 1)], steps=2, simulated=True)
    assert [each.is_equal for each in found.comparisons] == [True, False, True, False]
    assert found.culprit is not None
    assert (found.culprit.module, found.culprit.kind) == ("body.1", "BatchNorm2d")


@pytest.mark.slow
def test_what_cannot_be_certified_is_said():
    with pytest.raises(ValueError, match="3 data replicas of the mesh 3x1 cannot share a batch"):
        certify(Net(), batches(), [(3, 1)])
    with pytest.raises(ValueError, match=r"a mesh is data replicas x ranks of a domain, .* got"):
        certify(Net(), batches(), [(2,)])
    with pytest.raises(ValueError, match="steps must be 1 or more; got 0"):
        certify(Net(), batches(), steps=0)

    class Fails(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def forward(self, x):
            if isinstance(x, self.kind):
                raise ArithmeticError("in the middle")
            return x

    with pytest.raises(ProcessRaisedException, match="ArithmeticError: in the middle"):
        certify(Net(Fails(torch.Tensor)), batches(), [(1, 2)], simulated=True)

    split = lightning_shard.DomainTensor
    found = certify(Net(Fails(split)), batches(), [(1, 2)], steps=1, simulated=True)
    assert not found.is_equal
    assert "| 1x2 | 64-true | | | | failed: ArithmeticError: in the middle |" in str(found)


@pytest.mark.slow
def test_processes_are_certified_too():
    found = certify(Net(), batches(), [(2, 2)], steps=2)
    assert found.is_equal, str(found)


class Masked(Net):
    """Has a mask in its state, as attention has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def test_a_state_with_infinities_is_compared():
    """They are no reason to call any difference rounding."""
    found = certify(Masked(), batches(), [(1, 2)], steps=1, simulated=True)
    assert found.is_equal, str(found)
    assert all(each.bounds[0] < 1e-3 for each in found.comparisons)


def test_a_loss_that_is_nan_is_not_certified():
    """The weights behind it are NaN on any mesh."""
    net = Net(last=nn.Threshold(torch.inf, torch.nan))
    with pytest.raises(ValueError, match="the loss of step 0 in one process is NaN in 64-true"):
        certify(net, batches(), [(1, 2)], steps=2, simulated=True)
