"""Ranks that log other names or values than each other all end with a sentence."""

import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_shard import DisagreementError, launch
from tests import training
from tests.pairs import choose
from tests.training import shared_path

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Logs(LightningModule):
    """Logs in each kind of step what the functions of a test want."""

    def __init__(self, train=None, validate=None, plateau=False):
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        self.train_logs, self.validate_logs, self.plateau = train, validate, plateau
        self.rates = []

    def training_step(self, batch, batch_idx):
        if self.train_logs:
            self.train_logs(self)
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.validate_logs:
            self.validate_logs(self)

    test_step = validation_step

    def on_train_epoch_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "score"}
        }  # fmt: skip


def data():
    return DataLoader([torch.ones(1, 4, 3, dtype=torch.float64)] * 4, 1)


def fit(module, *callbacks, domain=(1,), epochs=1, **options):
    options = {"num_sanity_val_steps": 0, "max_epochs": epochs, "max_steps": -1} | options
    runner = training.trainer(domain, callbacks=list(callbacks), **options)
    runner.fit(module, data(), data())
    return runner


def in_other_order(**how):
    def logs(module):
        pair = [("a", 1.0), ("b", 100.0)]
        for name, value in pair if module.global_rank == 0 else pair[::-1]:
            module.log(name, value, sync_dist=True, **how)

    return logs


HOW = pytest.mark.parametrize(
    "how",
    [{"on_epoch": True, "on_step": False}, {"on_epoch": False, "on_step": True}],
    ids=["by epoch", "by step"],
)


@pytest.mark.spmd(2)
@HOW
def test_names_in_another_order(how):
    expected = (
        "rank 1 logs 'b', where rank 0 logs 'a'; log the same names with sync_dist=True in the same"
    )
    with pytest.raises(DisagreementError, match=re.escape(expected)):
        fit(Logs(in_other_order(**how)))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_names_in_another_order_of_evaluation(stage):
    module = Logs(validate=in_other_order())
    runner = training.trainer((1,))
    with pytest.raises(DisagreementError, match="log the same names with sync_dist=True"):
        getattr(runner, stage)(module, data(), verbose=False)


@pytest.mark.spmd(2)
@pytest.mark.parametrize(("stage", "rank"), choose(["train", "validate"], [1, 0]))
def test_one_rank_logs_more(stage, rank):
    def logs(module):
        module.log("a", 1.0, on_epoch=True, on_step=False, sync_dist=True)
        if module.global_rank == rank:
            module.log("b", 2.0, on_epoch=True, on_step=False, sync_dist=True)

    more, less = f"rank {rank} logs 'b'", f"rank {1 - rank} comes to the end of the epoch"
    expected = f"{more}, where {less}" if rank else f"{less}, where {more}"
    with pytest.raises(DisagreementError, match=expected):
        fit(Logs(**{stage: logs}))


class ByHand(Logs):
    """Steps its scheduler by itself, with a value of its rank."""

    def __init__(self):
        super().__init__(plateau=True)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step(float(self.global_rank * self.trainer.current_epoch))


def one_more_in_a_step(stage, first):
    """A rank that logs once more, from some step on."""
    steps = []

    def logs(module):
        module.log("a", 1.0, on_epoch=False, on_step=True, sync_dist=True)
        if module.global_rank == 1 and len(steps) >= first:
            module.log("b", 2.0, on_epoch=False, on_step=True, sync_dist=True)
        steps.append(None)

    fit(Logs(**{stage: logs}), epochs=2)


def one_scheduler():
    warnings.simplefilter("ignore")  # Lightning's, of the monitor of manual optimization
    module = ByHand()
    module.on_train_epoch_end = lambda: module.global_rank or module.lr_schedulers().step(1.0)
    fit(module, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "arguments", "words"),
    [
        (one_scheduler, (), "rank 0 steps ReduceLROnPlateau, where rank 1 comes to the next batch"),
        (one_more_in_a_step, ("train", 2), "rank 1 logs 'b', where rank 0 "),
        (one_more_in_a_step, ("validate", 2), "rank 1 logs 'b', where rank 0 "),
    ],
    ids=["scheduler", "train", "validate"],
)
def test_one_rank_does_more(body, arguments, words):
    """In processes of their own: a rank that waits in a collective is ended, in seconds."""
    began = time.monotonic()
    with pytest.raises(ProcessRaisedException) as raised:
        launch(body, *arguments, processes=2, timeout_s=60)
    either = f"the ranks do different things: {words}|, where rank 1 logs a value with sync_dist"
    assert re.search(either, str(raised.value))
    assert time.monotonic() - began < 40


@pytest.mark.spmd(2)
def test_a_scheduler_that_is_stepped_by_hand():
    words = "disagree on 'the value of step\\(\\)', which ReduceLROnPlateau follows: it is 0 on"
    with pytest.raises(DisagreementError, match=words):
        fit(ByHand(), epochs=4, domain=(2,))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sync", [False, True])
def test_the_mean_over_replicas_decides(sync):
    """As with `sync_dist=True`: it is 0, 0.5 and 1 here. Without that a run says so, once."""

    def logs(module):
        module.log("score", float(module.global_rank * module.current_epoch), sync_dist=sync)

    module, stops = Logs(validate=logs, plateau=True), EarlyStopping("score", patience=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = fit(module, stops, epochs=5)
    assert module.rates == pytest.approx([0.1, 0.1, 0.01])
    assert runner.current_epoch == 3  # the third epoch is the second without a smaller score
    said = [w for w in caught if "the mean over the replicas decides" in str(w.message)]
    assert len(said) == (not sync and dist.get_rank() == 0)


@pytest.mark.spmd(2)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_on_one_replica_decides(value):
    """A file is kept for the second epoch, whose mean is finite."""

    def logs(module):
        first = module.current_epoch == 0 and module.global_rank == 1
        module.log("score", value if first else 1.0 + module.current_epoch)

    folder = shared_path(f"not_finite_{value}")
    checkpoint = ModelCheckpoint(folder, "{epoch}", monitor="score")
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    fit(Logs(validate=logs), checkpoint, epochs=2, **options)
    assert checkpoint.best_model_path.endswith("epoch=1.ckpt")


class LogsLate(Logs):
    """Logs after the values of the epoch were compared."""

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self.log("late", 1.0, sync_dist=True)


@pytest.mark.spmd(2)
def test_one_rank_logs_more_as_an_epoch_ends():
    expected = "rank 1 comes to the next batch or epoch, where rank 0 logs 'late'"
    with pytest.raises(DisagreementError, match=expected):
        fit(LogsLate(), num_sanity_val_steps=0, limit_val_batches=0)


@pytest.mark.quick_rows("4x1")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["4x1", "2x2"])
def test_values_are_reduced_as_before(domain):
    def logs(module):
        replica = module.global_rank // domain[0]
        for op in ("mean", "sum", "max", "min"):
            module.log(op, float(replica), on_epoch=True, sync_dist=True, reduce_fx=op)
            value = torch.tensor(replica + 0.5, dtype=torch.float64)
            module.log(f"{op}_step", value, on_step=True, on_epoch=False, sync_dist=True,
                       reduce_fx=op)  # fmt: skip

    runner, replicas = fit(Logs(logs), domain=domain), 4 // domain[0]
    numbers = torch.arange(replicas, dtype=torch.float64)
    steps = 4 // replicas
    expected = {
        "mean": numbers.mean(), "sum": steps * numbers.sum(), "max": numbers.max(), "min": 0.0,
        "mean_step": numbers.mean() + 0.5, "sum_step": (numbers + 0.5).sum(),
        "max_step": numbers.max() + 0.5, "min_step": 0.5,
    }  # fmt: skip
    found = {name: float(runner.callback_metrics[name]) for name in expected}
    assert found == {name: float(value) for name, value in expected.items()}


def own_score(module):
    """Rank 0 gets worse in each epoch, rank 1 better."""
    sign = 1 if module.global_rank == 0 else -1
    module.log("score", sign * float(module.current_epoch + 1), on_epoch=True)


def disagree(kind):
    sentence = (
        f"the ranks disagree on 'score', which {kind} follows: it is 1 on rank 0 and -1 on rank 1; "
        "log it on all ranks, with sync_dist=True."
    )
    return pytest.raises(DisagreementError, match=f"^{re.escape(sentence)}$")


@pytest.mark.spmd(2)
def test_a_learning_rate_that_follows_a_rank():
    with disagree("ReduceLROnPlateau"):
        fit(Logs(validate=own_score, plateau=True), epochs=4, domain=(2,))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("callback", [EarlyStopping, ModelCheckpoint])
def test_callbacks_that_follow_a_rank(callback):
    saves = callback is ModelCheckpoint
    options = {"enable_checkpointing": saves, "default_root_dir": shared_path("follows")}
    with disagree(callback.__name__):
        fit(Logs(validate=own_score), callback(monitor="score"), epochs=4, domain=(2,), **options)


@pytest.mark.spmd(2)
def test_a_monitored_value_that_one_rank_logs():
    def logs(module):
        if module.global_rank == 0:
            module.log("score", 1.0, rank_zero_only=True)

    callback = ModelCheckpoint(monitor="score")
    options = {"enable_checkpointing": True, "default_root_dir": shared_path("one")}
    with pytest.raises(DisagreementError, match="it is 1 on rank 0 and not logged on rank 1"):
        fit(Logs(validate=logs), callback, **options)


def common_score(module):
    """Equal but for rounding, which decides between two epochs on one rank alone."""
    rounding = 1e-12 if module.global_rank and module.current_epoch else 0.0
    module.log("score", torch.tensor(1.0 - rounding, dtype=torch.float64))


@pytest.mark.spmd(2)
def test_what_differs_by_rounding_is_decided_as_on_rank_0():
    """Also the values in the names of files, which no callback monitors."""

    def logs(module):
        common_score(module)
        module.log("own", float(module.global_rank))

    folder = shared_path("rounding")
    checkpoint = ModelCheckpoint(folder, "{epoch}-{own}", monitor="score")
    options = {"enable_checkpointing": True, "default_root_dir": folder}
    module = Logs(validate=logs, plateau=True)
    runner = fit(module, checkpoint, EarlyStopping("score", patience=5), epochs=3, **options)
    found = [None] * 2
    dist.all_gather_object(found, (checkpoint.best_model_path, module.rates))
    assert found[0] == found[1]
    assert checkpoint.best_model_path.endswith("epoch=0-own=0.0.ckpt")
    runner.test(module, data(), ckpt_path="best", verbose=False)


@pytest.mark.spmd(2)
def test_a_module_is_left_as_it_was():
    module = Logs(plateau=True, validate=common_score)
    runner = fit(module, epochs=1)
    (config,) = runner.lr_scheduler_configs
    assert type(config.scheduler) is torch.optim.lr_scheduler.ReduceLROnPlateau
    assert "step" not in config.scheduler.state_dict()
