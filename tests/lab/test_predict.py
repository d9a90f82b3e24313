"""What a step takes on a cluster is predicted by one rank on fake tensors."""

import copy
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from lightning_shard.domain.errors import UnsupportedOperationError
from lightning_shard.lab import fake_trainer
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.clusters import read_cluster
from lightning_shard.lab.fake_trainer import traced
from lightning_shard.lab.machine import Cluster, Collective, Cost, Device, Link
from lightning_shard.lab.predict import predict, rank_inside
from lightning_shard.lab.run import Task, on_each_rank, run_here
from lightning_shard.lab.timeline import Ledger
from lightning_shard.memory import offload
from lightning_shard.processes.torch_private.internals import base_of
from tests.pairs import choose

SLOW = pytest.mark.slow
SNAIL = Device("slow", 10**9, {"float32": 1e6, "float64": 1e5}, 1e9, 1e-9, "made up")
LINK = Link(1e6, 1e-3)


def cluster(devices, per_node=8):
    nodes = max(1, devices // per_node)
    return Cluster(SNAIL, devices // nodes, nodes, LINK, Link(1e5, 2e-3))


class Net(LightningModule):
    def __init__(self, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(2, channels, 5, padding=2), nn.GroupNorm(2, channels), nn.GELU(),
            nn.Conv2d(channels, 1, 3, padding=1),
        )  # fmt: skip

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Wide(Net):
    """A product of matrices of 64 x 64."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(64, 64, bias=False)


class Refused(Net):
    def training_step(self, batch):
        return torch.linalg.eigvals(batch[0, 0]).real.mean() + super().training_step(batch)


def data(*shape):
    return DataLoader([torch.zeros(()).expand(shape)], batch_size=None)


def test_the_loop_of_a_trainer_takes_its_time_in_each_step():
    machine = cluster(1)
    slower = replace(machine, device=replace(machine.device, per_step=3.0))
    bare, found = (predict(Net(), data(1, 2, 8, 8), 1, each) for each in (machine, slower))
    assert found.seconds == pytest.approx(bare.seconds + 3)


class Kept(Callback):
    """Adds up the memory that autograd keeps in forward, without parameters and the batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.sizes, known = {}, {memory(batch.to_local())}

        def keep(x):
            source = base_of(x)
            is_parameter = source.requires_grad and source.grad_fn is None
            if memory(x) not in known and not is_parameter:
                self.sizes[memory(x)] = x.untyped_storage().nbytes()
            return x

        self.hooks = saved_tensors_hooks(keep, lambda x: x)
        self.hooks.__enter__()

    def on_before_backward(self, trainer, pl_module, loss):
        self.hooks.__exit__()


def memory(x):
    return x.untyped_storage().data_ptr()


def bytes_for_backward(task):
    run_here(task, kept := Kept())
    return sum(kept.sizes.values())


PLANNED_FIRST = """
import os, torch
from tests.lab.test_predict import Net, data, predict
predict(Net(4), data(2, 2, 12, 24), (1, 2))
child = os.fork()
if not child:
    torch.ones(3, requires_grad=True).sum().backward()
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_process_that_has_planned_can_fork_ranks():
    """The first backward pass of the process is not one of fake tensors."""
    done = subprocess.run([sys.executable, "-c", PLANNED_FIRST], capture_output=True, text=True)
    assert done.stdout.endswith("ended with 0\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(1, 2, 2), pytest.param((1, 2), marks=SLOW), pytest.param((2, 3), marks=SLOW)]
)
def test_bytes_are_those_of_real_ranks(mesh):
    """Of the rank in the middle: what it sends, and what it keeps from forward for backward."""
    fields = data(2, 2, 12, 24)
    found = predict(Net(16), fields, mesh, cluster(math.prod(mesh)))
    task = Task(Net(16), None, first_batches(Net(16), fields, "fit"), (1, *mesh[1:]))
    kept = on_each_rank(bytes_for_backward, task)[rank_inside(mesh)]
    assert found.memory_by_cause["activations"] == pytest.approx(kept, rel=0.05)
    assert found.memory_by_cause["optimizer"] > 0
    assert sum(found.memory_by_cause.values()) == found.memory


class Copying(Net):
    """A metric copies what it begins with, deeply."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        assert copy.deepcopy(loss.detach()).fake_mode is loss.fake_mode
        self.log("loss", loss)
        return loss


@pytest.mark.slow
def test_steps_that_log_free_memory_once(monkeypatch):
    """Weak references to memory free it; torch copies them with what fake tensors know."""
    copied = []
    monkeypatch.setattr(StorageWeakRef, "__deepcopy__", copied.append, raising=False)
    predict(Copying(), data(1, 2, 12, 24), 2)
    assert copied == []


def test_operations_take_their_flops_or_their_bytes():
    module, x = Wide(), torch.zeros(1, 3, 64, 64)
    task = Task(module, None, [x], (1, 1))
    flops = 2 * 3 * 64**3  # forward; the gradient of the weight takes as many
    slow = traced(task, 0, SNAIL).timeline.computed
    assert slow == pytest.approx(2 * flops / 1e6, rel=0.1)
    quick = Device("quick", 10**9, {"float32": 1e15}, 1e6, 1e-12, "made up")
    of_bytes = traced(task, 0, quick).timeline.computed
    assert of_bytes > 2 * (2 * x.nbytes + 64 * 64 * 4) / 1e6


@pytest.mark.slow
def test_more_ranks_compute_and_hold_less():
    few, many = (predict(Net(), data(1, 2, 64, 64), n, cluster(n)) for n in (2, 8))
    assert many.compute < 0.5 * few.compute
    assert many.memory < 0.5 * few.memory
    assert many.exchange + many.overlapped > 0
    assert few.samples == many.samples == 1
    assert "backward" in few.peak_at or "forward of" in few.peak_at
    assert few.fits(cluster(2))


@pytest.mark.slow
def test_recomputed_and_offloaded_activations_free_memory(monkeypatch):
    monkeypatch.setattr(offload, "AHEAD_BYTES", 2**20)

    class Deep(Net):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(128, 128, 3, padding=1) for _ in range(4)]
            self.layers = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))

        def training_step(self, batch):
            return self.layers(batch).mean()

    fields = data(1, 128, 96, 96)
    whole = predict(Deep(), fields, 2, cluster(2))
    moved = predict(Deep(), fields, 2, cluster(2), activation_offload="0GB")
    fits = predict(Deep(), fields, 2, cluster(2), activation_offload=True)
    assert fits.memory == whole.memory  # on a device that has room for all
    again = predict(Deep(), fields, 2, cluster(2), activation_checkpointing=True)
    assert moved.memory < whole.memory
    assert moved.seconds > whole.seconds
    assert again.memory <= whole.memory
    assert again.compute > 1.2 * whole.compute


@pytest.mark.slow
def test_the_module_stays_as_it_is():
    module = Net()
    before = copy.deepcopy(module.state_dict())
    predict(module, data(1, 2, 16, 16), 2, cluster(2), precision="bf16-mixed")
    assert type(next(module.parameters()).data) is torch.Tensor
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.slow
def test_each_mode_of_sharding():
    modes = ("full", "gradients", "none", "hybrid")
    fields, nodes = data(1, 2, 16, 16), cluster(4, per_node=2)
    found = {m: predict(Net(64), fields, "2x2", nodes, sharding=m) for m in modes}
    states = {m: f.memory_by_cause["parameters"] for m, f in found.items()}
    assert states["full"] < states["hybrid"] < states["none"]
    assert found["none"].parameters_traffic > 0
    assert found["full"].parameters_traffic > 0
    numbers = sum(p.numel() for p in Net(64).parameters())
    assert found["none"].sent_for_parameters >= 4 * numbers  # the gradients


def test_the_mode_goes_by_the_memory_of_the_device():
    fields = data(1, 2, 16, 16)
    for memory, mode in ((80e9, "none"), (1e6, "full")):
        nodes = cluster(4)
        nodes = replace(nodes, device=replace(nodes.device, memory=memory))
        found, wanted = (predict(Net(64), fields, "2x2", nodes, sharding=m) for m in ("auto", mode))
        assert found.memory_by_cause == wanted.memory_by_cause


class Modes(Net):
    """Writes modes into zeros, as most networks do that were written by hand."""

    def training_step(self, batch):
        field = self.layers(batch)
        zeros = torch.zeros(*field.shape[:-1], field.shape[-1] // 2 + 1, dtype=torch.complex64)
        zeros[..., :4] = torch.fft.rfft2(field)[..., :4]
        return torch.fft.irfft2(zeros, s=field.shape[-2:]).square().mean()


def test_zeros_that_take_modes():
    found = predict(Modes(), data(1, 2, 16, 16), 2, cluster(2))
    assert found.sent_for_fields > predict(Net(), data(1, 2, 16, 16), 2, cluster(2)).sent_for_fields


def test_what_cannot_be_split_is_refused_by_name():
    with pytest.raises(UnsupportedOperationError, match="eigvals"):
        predict(Refused(), data(1, 2, 8, 8), 2)


def test_a_mesh_of_another_size():
    message = "the mesh 2x2 has 4 ranks, but the cluster has 8 devices; give a mesh of as many"
    with pytest.raises(ValueError, match=re.escape(message)):
        predict(Net(), data(1, 2, 8, 8), (2, 2), cluster(8))


def test_links_of_near_and_far_ranks():
    cost = cluster(16).cost
    assert cost(Collective("all_to_all_single", (0, 1), 1000)) == Cost(0, 2e-3)
    assert cost(Collective("all_reduce", (0, 1, 2, 3), 0)) == Cost(0, 2e-3)
    assert cost(Collective("all_gather_single", (0, 8), 1000)) == Cost(0, 2e-3 + 1e-2)
    assert cost(Collective("all_reduce", (3,), 1000)) == Cost(0, 0)


def test_a_rank_with_neighbours_on_both_sides():
    assert rank_inside((2, 4)) == 1
    assert rank_inside((2, 4, 3)) == 4
    assert rank_inside((4, 1)) == 0


@pytest.mark.slow
def test_it_prints_a_table_and_leaves_a_batch_of_shapes():
    fields = data(1, 2, 16, 16)
    shown = str(predict(Net(), fields, 2, cluster(2)))
    first, split, title, *rows = shown.splitlines()
    assert first == "The rates of slow and its links: made up."
    assert split == "split over the domain: batch (dim 2)"
    where = "One of 2 ranks (1 data replica x 2 domain ranks) of 1x2xslow (made up), in one"
    assert title.startswith(where)
    assert [row.split("  ")[1] for row in rows[:2]] == ["step", ""]
    assert "peak memory" in shown
    assert "fits into 953.7 MiB" in shown
    shown = str(predict(Net(), fields, 2, "2xH100"))
    sentence = read_cluster("2xH100").origin
    assert shown.splitlines()[0] == sentence
    assert first_batches(Net(), fields, "fit")[0].untyped_storage().nbytes() == 4


class Attends(Net):
    """Attention over all rows of a field, whose heads are laid out anew behind it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(8, 24)

    def training_step(self, batch):
        rows = self.layers(batch.flatten(2).transpose(1, 2)).unflatten(2, (3, 2, 4))
        q, k, v = rows.transpose(1, 3).unbind(2)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).flatten(2).square().mean()


@pytest.mark.slow
def test_attention_is_traced():
    fields = data(1, 8, 8, 8)
    module = Attends()
    for mesh in ((1, 1), (1, 2)):
        found = predict(module, fields, mesh)
        assert found.memory_by_cause["parameters"] <= 24 * 9 * 4


def test_parameters_are_held_once():
    class Large(Net):
        def __init__(self):
            super().__init__()
            self.layers = nn.Linear(512, 512, bias=False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    found = predict(Large(), data(1, 1, 1, 512), 1)
    # they, their gradients, and one that is copied as fake tensors are when it is kept
    assert found.memory < 3.1 * 512 * 512 * 4


class Files(LightningDataModule):
    """Reads what it has from a file, and gives the module a number of it."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def setup(self, stage):
        self.fields = torch.load(self.path)
        self.scale = self.fields.std().item()

    def train_dataloader(self):
        return DataLoader(self.fields, batch_size=2)


class Logs(Net):
    def training_step(self, batch):
        loss = super().training_step(batch) * self.trainer.datamodule.scale
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.slow
def test_data_modules_that_read_files_and_modules_that_log(tmp_path):
    torch.save(torch.randn(4, 2, 12, 9), tmp_path / "fields.pt")
    found = predict(Logs(), Files(tmp_path / "fields.pt"), 2, cluster(2))
    assert found.samples == 2
    assert found.seconds > 0


class Reads(Net):
    """Reads numbers of tensors as it was asked to."""

    def __init__(self, way):
        super().__init__(8)
        self.way = way

    def training_step(self, batch):
        kept = self.layers(batch)
        loss = kept.square().mean()
        if self.way == "logged":
            self.seen = loss.item()
        elif self.way == "checked":
            assert loss.isfinite()
        elif self.way == "normalized":
            loss = loss * (kept > 0).sum().item()
        elif self.way == "counted":  # as many rounds as a number of the batch says
            for _ in range(int(batch.abs().max().item())):
                loss = loss + self.layers(batch).sin().sin().mean()
        elif self.way == "masked":
            loss = loss + kept[kept > kept.mean()].exp().mean()
        return loss


def ones(*shape):
    return DataLoader([2 * torch.ones(shape)], batch_size=None)


@pytest.mark.slow
@pytest.mark.parametrize("way", choose(["logged", "checked", "normalized"], fast=["normalized"]))
def test_numbers_that_change_nothing_are_not_needed(way):
    found = predict(Reads(way), ones(1, 2, 16, 16), 2, cluster(2))
    assert not found.is_measured
    plain = predict(Net(8), ones(1, 2, 16, 16), 2, cluster(2))
    assert found.sent_for_parameters == plain.sent_for_parameters


@pytest.mark.quick_rows("counted-1x1")
@pytest.mark.parametrize(("way", "mesh"), choose(["counted", "masked"], ["1x1", "1x2"]))
def test_a_step_that_needs_numbers_is_measured(way, mesh):
    found = predict(Reads(way), ones(1, 2, 16, 16), mesh, cluster(1 if mesh == "1x1" else 2))
    plain = predict(Net(8), ones(1, 2, 16, 16), mesh, cluster(1 if mesh == "1x1" else 2))
    assert found.is_measured
    assert found.compute > plain.compute
    if way == "counted":  # two more rounds, of which each keeps as much as the step without them
        assert found.activations > 2 * plain.activations
    assert "measured on real tensors" in str(found)


@pytest.mark.slow
def test_a_measured_step_is_as_the_traced_one():
    for mesh in ((1, 1), (1, 2), (2, 2)):
        task = Task(Net(16), None, [torch.ones(2, 2, 12, 24)], mesh)
        fake, real = (
            fake_trainer._trace(task, 0, lambda: Ledger(SNAIL), number) for number in (1, None)
        )
        assert real.equals(fake)
        assert real.activations == fake.activations
        assert real.peak.causes == pytest.approx(fake.peak.causes, rel=0.02)


def test_mistyped_arguments_do_not_reach_the_trainer():
    with pytest.raises(TypeError, match=r"predict\(\) nor the Trainer has an argument 'shardin'"):
        predict(Net(), data(1, 2, 8, 8), 2, shardin="full")


class FirstRow(Net):
    """Reads a row of the split dim, which every rank then holds whole."""

    def training_step(self, batch):
        field = self.layers(batch)
        return (field + field[:, :, 0].mean()).square().mean()


def test_rows_that_every_rank_holds_are_no_numbers():
    module = FirstRow(8)
    found = predict(module, ones(1, 2, 16, 16), "1x2", cluster(2))
    assert not found.is_measured
    assert found.memory > 0


class Mixes(Net):
    """Multiplies values of two types, as attention does after a softmax."""

    def training_step(self, batch):
        rows = self.layers(batch).permute(0, 2, 3, 1)
        return torch.matmul(rows.float(), rows.bfloat16().mT).square().mean()


def test_types_that_autocast_makes_alike_are_asked_without_a_word(caplog):
    module = Mixes(8)
    mixed = {"precision": "bf16-mixed"}
    predict(module, ones(1, 2, 16, 16), "1x2", cluster(2), **mixed)
    assert "failed" not in caplog.text
