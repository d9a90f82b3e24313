"""The rehearsal of a user's module on this machine."""

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

import lightning_shard
from lightning_modules import DarcyDataModule, TFNODarcy
from lightning_shard.lab.batches import first_batches
from lightning_shard.lab.record import Inspection, record_here
from lightning_shard.lab.run import Task
from lightning_shard.tensor import gathering
from tests.tensor.test_escape import Cube


class Net(LightningModule):
    def __init__(self, middle=torch.relu, optimizer=torch.optim.SGD):
        super().__init__()
        self.optimizer = optimizer  # torch decides a tenth of the time where parts of Adam's are
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(4), middle

    def training_step(self, batch, batch_idx):
        loss = (self.second(self.middle(self.norm(self.first(batch["x"])))) - batch["y"]).square()
        self.log("loss", loss.mean())
        return loss.mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def data(shape=(1, 12, 10), samples=4):
    return DataLoader(
        [{"x": torch.randn(shape), "y": torch.randn(shape)} for _ in range(samples)],
        2,
        shuffle=True,
    )


@pytest.mark.slow
def test_a_module_that_runs(capfd):
    module = Net(nn.Dropout(0.3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batches, state = data(), torch.get_rng_state()
    found = lightning_shard.check(module, batches)
    assert torch.get_rng_state().equal(state)
    assert found.is_exact
    assert found.is_supported
    assert found.training.differences.keys() == before.keys()
    assert "One training step on 2 ranks equals that of one process" in str(found)
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert not capfd.readouterr().out


@pytest.mark.slow
def test_a_module_of_a_data_module(tmp_path):
    small = {"train_resolution": 8, "num_train": 4, "num_val": 2, "num_test": 2, "batch_size": 2}
    module = TFNODarcy(n_modes=(4, 4), hidden_channels=4, n_layers=2)
    darcy = DarcyDataModule(root=str(tmp_path), **small)
    found = lightning_shard.check(module, darcy, mesh=(1, 2, 1))
    assert found.is_supported, str(found)
    assert "One training step on 2x1 ranks equals that of one process" in str(found)
    assert "split over the domain: x (dims 2, 3), y (dims 2, 3)" in str(found)
    assert list(found.evaluation) == ["validation_step", "test_step", "predict_step"]
    for step in found.evaluation.values():  # one loader for each of the two test resolutions
        assert step.split.split
        assert any("['prediction']" in name for name in step.differences)
        assert any("of loader 1" in name for name in step.differences)
    assert {"val/h1_8", "val/h1_16", "val/l2_16_baseline"} <= set(
        found.evaluation["validation_step"].differences
    )


@pytest.mark.slow
def test_functions_without_a_rule_are_all_named():
    def middle(x):
        rank = torch.linalg.matrix_rank(x.detach())
        return x * torch.linalg.svdvals(x).sum() / rank.sum()

    found = lightning_shard.check(Net(middle), data(), precision="64-true")
    assert found.is_exact, str(found)
    assert not found.is_supported
    assert any("svdvals" in name for name in found.gathered), found.gathered
    assert any("matrix_rank" in name for name in found.gathered), found.gathered
    assert "It is exact, but gathering costs memory" in str(found)


class OfRows(torch.autograd.Function):
    """Its backward counts the rows of this rank alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.to_local().shape[2] if hasattr(x, "to_local") else x.shape[2]
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.rows


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if hasattr(x, "to_local"):
            raise TypeError("needs a plain tensor")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.slow
def test_custom_functions_are_tried():
    def middle(x):
        x = Cube.apply(x)  # gathered, it would hide the others
        return OfRows.apply(x) + Fails.apply(x)

    module = Net(middle)
    found = lightning_shard.check(module, data(), precision="64-true")
    assert found.is_exact, str(found)
    assert not found.is_supported
    said = {name.rpartition(".")[2]: what for name, what in found.training.functions.items()}
    assert said["Cube"] == "value and gradient agree"
    assert said["OfRows"].startswith("its value agrees, and gradients differ by up to ")
    assert said["Fails"] == "it fails: TypeError: needs a plain tensor"
    assert "Cube) value and gradient agree." in str(found)


@pytest.mark.slow
def test_an_operation_that_is_refused():
    found = lightning_shard.check(Net(lambda x: x.detach().apply_(abs) + x), data())
    assert not found.is_exact
    assert "apply_" in str(found)
    assert "the training step stopped: cannot run" in str(found)


@pytest.mark.slow
def test_rounding_is_told_from_mistakes():
    """A gradient that is the small difference of large sums."""

    class Cancels(Net):
        def training_step(self, batch, batch_idx):
            y = self.first(batch["x"])
            return 1e-4 * y.mean() + (10 * (y - y.mean(dim=(2, 3), keepdim=True))).mean()

    torch.manual_seed(1)  # of eight seeds one gave a difference below the tolerance
    found = lightning_shard.check(Cancels(), data((1, 64, 64)))
    assert found.is_exact, str(found)
    assert found.training.rounding > 1e-4
    assert "These numbers are from float64, since " in str(found)


class Local(Net):
    """Scales its loss by what one rank alone has."""

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        rows = x.to_local() if hasattr(x, "to_local") else x
        return super().training_step(batch, batch_idx) * (1 + rows.mean().abs())


class Looks(Net):
    """Computes a further number on the first rank, which changes nothing."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            batch["x"].sin()
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_what_differs_is_said():
    found = lightning_shard.check(Local(), data())
    assert not found.is_exact
    assert "DIFFERS FROM that of one process" in str(found)
    assert "A training stops: the losses of these steps differ: " in str(found)


@pytest.mark.slow
def test_what_stops_a_training_is_said_where_the_numbers_are_equal():
    found = lightning_shard.check(Looks(), data(), precision="64-true")
    assert not found.is_exact
    assert "equals that of one process" in str(found)
    assert "A training stops: the ranks have computed different steps: " in str(found)
    assert "is not rounding" not in str(found)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("module", "sentence"),
    [(Local, "the losses of these steps differ: "), (Looks, "the ranks have computed different")],
)
def test_a_step_that_differs_between_ranks_is_recorded(module, sentence):
    """A training ends with an error there, and so did the check that explains it."""
    torch.manual_seed(0)
    module = module()
    task = Task(module, None, first_batches(module, data(), "fit"), (1, 2))
    found = record_here(task, Inspection())
    (said,) = found.apart_in_steps
    assert said.startswith(sentence)
    assert len(found.losses) == 1
    assert dist.get_rank() or found.gradients.keys() == dict(module.named_parameters()).keys()


def test_several_loaders_are_refused():
    with pytest.raises(ValueError, match="one DataLoader of training batches, is needed; got list"):
        lightning_shard.check(Net(), [data(), data()])


@pytest.mark.parametrize("try_out", [lightning_shard.check, lightning_shard.plan])
def test_a_class_or_a_network_is_refused(try_out):
    with pytest.raises(TypeError, match=r"needed; got the class Net; write Net\(\)\.$"):
        try_out(Net, data())
    with pytest.raises(TypeError, match=r"a LightningModule is needed; got Linear\.$"):
        try_out(torch.nn.Linear(2, 2), data())
    with pytest.raises(ValueError, match=r"needed; got the class DataLoader; write DataLoader\("):
        try_out(Net(), DataLoader)


class StopsIn(Net):
    """One step does what split tensors cannot; the others do not."""

    def __init__(self, step=""):
        super().__init__()
        self.step = step

    def evaluate(self, step, batch):
        x = self.first(batch["x"])
        if step == self.step:
            x = torch.linalg.svdvals(x).sum() + x.apply_(abs)
        return {"mean": x.mean(), "largest": x.amax((1, 2, 3)), "kind": "a"}

    def validation_step(self, batch, batch_idx):
        found = self.evaluate("validation_step", batch)
        self.log("val_mean", found["mean"])
        return found

    def test_step(self, batch, batch_idx):
        return self.evaluate("test_step", batch)

    def predict_step(self, batch, batch_idx):
        return self.evaluate("predict_step", batch)


@pytest.mark.slow
def test_evaluation_and_prediction_are_rehearsed_too():
    """`fit` stops in its validation: a check of the training step alone does not see it."""
    found = lightning_shard.check(StopsIn("validation_step"), data())
    assert found.training.is_exact
    assert not found.is_exact
    assert "On 2 ranks the validation_step stopped: cannot run" in str(found)
    assert "computed on gathered ones in validation_step:\n  torch.linalg.svdvals" in str(found)
    for step in ("test_step", "predict_step"):
        assert found.evaluation[step].is_exact
        assert not found.evaluation[step].gathered
        assert f"One {step} on 2 ranks equals that of one process" in str(found)
    assert list(found.evaluation["predict_step"].differences) == [
        "output['mean']", "output['largest']", "output['kind']",
    ]  # fmt: skip


@pytest.mark.slow
def test_an_evaluation_that_differs():
    class Local(StopsIn):
        def test_step(self, batch, batch_idx):
            x = batch["x"]
            return (x.to_local() if hasattr(x, "to_local") else x).mean()

    found = lightning_shard.check(Local(), data())
    assert not found.is_exact
    assert "One test_step on 2 ranks DIFFERS FROM that of one process" in str(found)
    assert found.evaluation["validation_step"].is_exact


@pytest.mark.slow
def test_what_is_not_rehearsed_is_named():
    class Other(Net):
        def predict_step(self, batch, batch_idx):
            return self.first(batch["z"])

    class Data(LightningDataModule):
        def train_dataloader(self):
            return data()

        def val_dataloader(self):
            raise FileNotFoundError("no val.pt")

        def predict_dataloader(self):
            return data()

    found = lightning_shard.check(Other(), data())
    assert found.is_supported
    assert "predict_step was not rehearsed: in one process it fails on a training batch, " in str(
        found
    )
    assert "KeyError: 'z'" in found.not_rehearsed["predict_step"]
    found = lightning_shard.check(StopsIn(), Data())
    assert found.not_rehearsed == {
        "validation_step": "its batches: FileNotFoundError: no val.pt",
        "test_step": "Data has no test_dataloader",
    }
    found = lightning_shard.check(Net(), Data())  # has neither a predict_step nor a forward
    assert found.is_supported, str(found)
    assert list(found.not_rehearsed) == []
    assert list(found.evaluation) == []


@pytest.mark.slow
def test_nothing_split_is_said():
    class Tokens(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Embedding(11, 4)

        def training_step(self, batch, batch_idx):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = lightning_shard.check(Tokens(), DataLoader(list(torch.arange(16).view(2, 8) % 11), 2))
    assert found.is_exact
    assert not found.is_supported
    first, second = str(found).splitlines()[:2]
    assert first == "split over the domain: nothing; whole: batch (int64)"
    assert second.startswith("NOTHING WAS TRIED SPLIT: nothing of the batch is split, though 2 ")


@pytest.mark.spmd(2)
def test_one_of_several_processes_takes_simulated_ranks():
    """A Trainer runs a script once more for each of its processes, and check with it."""
    with pytest.raises(RuntimeError, match="Give simulated=True, which takes ranks within"):
        lightning_shard.check(Net(), data())
    assert lightning_shard.check(Net(), data(), simulated=True).is_exact


@pytest.mark.slow
def test_simulated_ranks_show_what_processes_show():
    module, batches = Net(nn.Dropout(0.3)), data((1, 24, 24))
    found = lightning_shard.check(module, batches, "1x3x2", simulated=True)
    assert found.is_supported, str(found)
    assert "One training step on 3x2 ranks equals that of one process" in str(found)
    for _ in range(2):  # the second finds nothing that the first has left
        gathering = lightning_shard.check(Net(torch.linalg.matrix_exp), batches, 2, simulated=True)
        assert gathering.is_exact
        assert gathering.gathered == ["torch.linalg.matrix_exp"]


def test_a_step_that_fails_fails_as_in_a_process():
    def middle(x):
        raise ArithmeticError("in the middle")

    with pytest.raises(ProcessRaisedException, match="ArithmeticError: in the middle"):
        lightning_shard.check(Net(middle), data(), simulated=True)


class WithoutNorm(Net):
    """Whose batch may be shared by data replicas."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def validation_step(self, batch, batch_idx):
        x = self.first(batch["x"])
        self.log("val_mean", x.mean(), sync_dist=True)
        return {"loss": x.mean(), "x": x, "shape": str(x.shape[1:])}


@pytest.mark.slow
def test_data_replicas_share_a_batch():
    found = lightning_shard.check(WithoutNorm(), data(), (2, 2), simulated=True)
    assert found.is_supported, str(found)
    step = found.evaluation["validation_step"]
    assert set(step.differences) == {
        "output['loss']", "output['x']", "output['shape']", "val_mean",
    }  # fmt: skip
    assert "One training step on 2 data replicas of 2 ranks equals that of one" in str(found)
    wrong = lightning_shard.check(Net(), data(), (2, 1), simulated=True)
    assert not wrong.is_exact  # each replica has statistics of its own samples
    with pytest.raises(ValueError, match="3 data replicas of the mesh 3x1 cannot share a batch"):
        lightning_shard.check(WithoutNorm(), data(), "3x1")


class Monitors(WithoutNorm):
    """As the tasks of torchgeo 0.8 do: what it monitors comes from a validation."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.first(batch["x"]).square().mean())

    def configure_callbacks(self):
        return [EarlyStopping("val_loss"), ModelCheckpoint("kept", monitor="val_loss")]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


@pytest.mark.slow
def test_what_is_monitored_in_validation_is_not_missed(tmp_path, monkeypatch):
    """Training without a validation has no such metric, and stopped with an exception."""
    monkeypatch.chdir(tmp_path)
    found = lightning_shard.check(Monitors(), data())
    assert found.is_supported, str(found)
    assert list(found.evaluation) == ["validation_step"]
    certificate = lightning_shard.certify(Monitors(), data(), ["1x2"], 3, simulated=True)
    assert certificate.is_equal, str(certificate)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", [lightning_shard.check, lightning_shard.certify])
def test_a_mistyped_argument_is_named(function):
    message = re.escape(f"neither {function.__name__}() nor the Trainer has an argument 'simulatd'")
    with pytest.raises(TypeError, match=f"{message}; did you mean 'simulated'"):
        function(Net(), data(), simulatd=True)
    with pytest.raises(TypeError, match="mesh"):
        function(Net(), data(), domain_parallel_size=2)


@pytest.mark.slow
def test_functions_that_this_process_has_gathered_before_are_named():
    with lightning_shard.allow_gather():
        found = [
            lightning_shard.check(Net(torch.linalg.matrix_exp), data((1, 8, 8)), simulated=True)
            for _ in range(2)
        ]
    gathering.gathered_functions[torch.linalg.matrix_exp] = None  # and warned of it
    found.append(lightning_shard.check(Net(torch.linalg.matrix_exp), data((1, 8, 8))))
    del gathering.gathered_functions[torch.linalg.matrix_exp]
    assert [each.gathered for each in found] == [["torch.linalg.matrix_exp"]] * 3


class Manual(LightningModule):
    """Updates two networks in one step, as a GAN does, and returns no loss."""

    def __init__(self, wrong=""):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
        self.wrong = wrong

    def training_step(self, batch, batch_idx):
        for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
            optimizer.zero_grad()
            loss = (getattr(self, name)(batch["x"]) - batch["y"]).square().mean()
            self.manual_backward(loss * (1 + self.global_rank) if name == self.wrong else loss)
            optimizer.step()
        self.log("rows", float(len(batch["x"])))

    def configure_optimizers(self):
        adam = torch.optim.Adam
        return [adam(self.first.parameters(), 0.01), adam(self.second.parameters(), 0.01)]


def test_all_updates_of_a_manual_step_are_compared():
    """Those of the second optimizer, too."""
    found = lightning_shard.check(Manual(), data(), simulated=True)
    assert found.is_supported
    assert "loss " not in str(found)  # there is none
    wrong = lightning_shard.check(Manual("second"), data(), simulated=True)
    assert not wrong.is_exact
    assert "Where: all outputs agree, and gradients differ from module second (Conv2d)" in str(
        wrong
    )


def test_batches_of_manual_steps_are_counted_not_updates():
    found = lightning_shard.certify(Manual(), data(), [(1, 2)], steps=3, simulated=True)
    assert found.is_equal, str(found)
    assert [len(each.losses) for each in found.comparisons] == [3, 3]
    predicted = lightning_shard.plan(Manual(), data(), mesh=(1, 2))
    assert {"optimizer", "gradients"} <= predicted.memory_by_cause.keys()


class Logs(Net):
    """Logs into a folder and to a logger, as some modules do."""

    def __init__(self, value=lambda x: x.mean()):
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_image("x", batch["x"][0])
        Path(self.logger.log_dir, "note.txt").write_text("a step")
        self.log("value", self.value(batch["x"]))
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self):
        return [LearningRateMonitor()]


def test_a_module_that_needs_a_logger_has_one(monkeypatch, tmp_path):
    """Loggers of a run are not those of its rehearsal, which leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    assert lightning_shard.check(Logs(), data(), simulated=True).is_supported
    assert not [*tmp_path.iterdir()]


def test_what_a_training_step_logs_is_compared():
    found = lightning_shard.check(
        Logs(lambda x: getattr(x, "to_local", lambda: x)().sum()), data(), simulated=True
    )
    assert not found.is_exact
    assert re.search(r"logged +of \d values, relative difference at most .* \(value\)", str(found))


def test_what_one_process_does_not_log_twice_is_not_compared():
    ticks = itertools.count(1)  # in place of a clock
    found = lightning_shard.check(Logs(lambda _: float(next(ticks))), data(), simulated=True)
    assert found.is_supported
    assert "Two runs in one process differ, too, in logged value." in str(found)


def test_ranks_that_differ_from_each_other_are_found():
    class Scaled(Net):
        def on_after_backward(self):
            self.first.weight.grad *= 1 + self.global_rank

    found = lightning_shard.check(Scaled(), data(), simulated=True)
    assert not found.is_exact
    assert "The ranks differ from each other by up to" in str(found)


def test_a_step_that_follows_the_clock_is_told():
    """One process does not repeat it either."""
    ticks = itertools.count(1)
    found = lightning_shard.check(Net(lambda x: x * next(ticks)), data(), simulated=True)
    assert not found.is_exact
    assert "Two runs in one process differ, too: the step depends on the time" in str(found)
