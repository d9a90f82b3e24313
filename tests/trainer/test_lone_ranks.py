"""A rank that communicates alone in a hook ends in seconds, with a sentence."""

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.multiprocessing import ProcessRaisedException

from lightning_shard import launch, shard
from lightning_shard.trainer.same_steps import SameSteps
from tests import training
from tests.parity import mesh_of
from tests.trainer.featured import Featured, fit_sharded, loader
from tests.trainer.test_programs import Pictures

READS = {
    "full_tensor": lambda p: p.full_tensor(),
    "norm": lambda p: float(p.norm()),
    "gradient": lambda p: p.grad.full_tensor(),
}


class Alone(Featured):
    """Rank 0 reads in a hook."""

    def __init__(self, hook, read):
        super().__init__()
        self.read = READS[read]
        setattr(self, hook, lambda *_: self.global_rank or self.read(self.network[0].weight))

    def validation_step(self, batch, batch_idx):
        return None


def read_alone(hook, read):
    fit_sharded(Alone(hook, read), (2,), strategy={"sharding": "full"}, max_epochs=2)


def ends_in_seconds(words, body, *args, within_s=40):
    """The run ends by an error of these words, long before a collective gives up."""
    began = time.monotonic()
    with pytest.raises(ProcessRaisedException, match=words):
        launch(body, *args, processes=2, timeout_s=90)
    assert time.monotonic() - began < within_s


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("hook", "read"),
    [
        ("on_train_batch_end", "full_tensor"),
        slow("on_train_batch_end", "norm"),
        slow("on_before_optimizer_step", "gradient"),
        slow("on_fit_start", "full_tensor"),
        slow("on_train_epoch_end", "full_tensor"),
        slow("on_train_end", "norm"),
    ],
)
def test_a_lone_read_of_a_shard(hook, read):
    ends_in_seconds(f"reads a sharded parameter in {hook}", read_alone, hook, read)


COLLECTIVES = {
    "barrier": lambda module: module.trainer.strategy.barrier(),
    "broadcasts an object": lambda module: module.trainer.strategy.broadcast(1),
    "calls reduce": lambda module: module.trainer.strategy.reduce(torch.ones(2)),
    "calls all_gather": lambda module: module.all_gather(torch.ones(2)),
}


class Communicates(Featured):
    """Rank 0 communicates in a hook."""

    def __init__(self, hook, words):
        super().__init__()
        call = COLLECTIVES[words]
        setattr(self, hook, lambda *_: None if self.global_rank else call(self))

    def validation_step(self, batch, batch_idx):
        return None


def communicate_alone(hook, words):
    fit_sharded(Communicates(hook, words), (2,), max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("on_train_batch_end", "barrier"),
        ("on_train_epoch_end", "broadcasts an object"),
        ("on_validation_end", "calls reduce"),
        ("on_fit_start", "calls all_gather"),
    ],
)
def test_a_lone_collective(hook, words):
    told = f"the ranks do different things: .*{words}.* in {hook}"
    ends_in_seconds(told, communicate_alone, hook, words)


@pytest.mark.quick_rows("full_tensor")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("read", ["full_tensor", "gradient"])
def test_all_ranks_read_it(read):
    class Together(Featured):
        def on_before_optimizer_step(self, optimizer):
            values.append(READS[read](self.network[0].weight))

    values = []
    fit_sharded(Together(), (2,), strategy={"sharding": "full"})
    assert all(torch.as_tensor(value).isfinite().all() for value in values)
    assert len(values) > 1


class Unordered(Featured):
    """Draws what a set names, whose order is another one in each process."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name in ["x", "y"] if self.global_rank == 0 else ["y", "x"]:
            self.logger.experiment.add_image(name, batch[name])


def draw_unordered():
    fit_sharded(Unordered(), (2,), logger=Pictures(), limit_val_batches=0, log_every_n_steps=1)


def test_pictures_of_one_shape_are_told_apart_by_their_names():
    """Else the rows of one would be put together with those of the other."""
    ends_in_seconds(r"gives .* as 'x' to the logger's add_image\(\)", draw_unordered)


class DrawsAlone(Featured):
    """Rank 0 draws in a step of a validation, and the others go on to the next."""

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and self.trainer.is_global_zero:
            self.logger.experiment.add_image("x", batch["x"])
        super().validation_step(batch, batch_idx)


def draw_alone():
    fit_sharded(DrawsAlone(), (2,), logger=Pictures())


@pytest.mark.slow
def test_a_lone_picture_of_a_validation():
    words = r"the logger's add_image\(\) in validation_step.* waits at"
    ends_in_seconds(words, draw_alone, within_s=60)


class OneRankFaster(Callback):
    """Changes the rate of one rank, say after a look at its own loss."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.5


class Named(Featured):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.parameters(), "name": "all"}], lr=0.05)


CHANGES = {
    "lr": (OneRankFaster, r"lr of optimizer 0 \(group 'all'\) is 0.05 on rank 0 and 0.5 on rank 1"),
    "accumulation": (
        lambda: GradientAccumulationScheduler({1: 1 + dist.get_rank()}),
        r"accumulate_grad_batches is \[{1: 1, .*}\] on rank 0 and \[{1: 2, .*}\] on rank 1",
    ),
}


@pytest.mark.quick_rows("2x1-lr", "1x2-accumulation")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["2x1", "1x2"])
def test_what_one_rank_changes_in_its_steps_is_refused(what, domain):
    """Else the weights of the ranks would drift apart in silence."""
    callback, words = CHANGES[what]
    with pytest.raises(ValueError, match=words):
        fit_sharded(Named(), domain, callbacks=[callback()], max_epochs=3)


RANK_0_ALONE = {
    "field": r"ranks have computed different steps: rank 0 has called Tensor\.mul on split "
    r"tensors \d+ times, and rank 1 \d+ times",
    "loss": r"losses of these steps differ: they add up to \S+ on rank 0 and to \S+ on rank 1",
}


class ComputesAlone(Featured):
    """The first process doubles the field or the loss of its steps."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def loss(self, batch):
        doubled = self.what if self.global_rank == 0 else None
        y = self(batch["x"])
        loss = ((y * 2 if doubled == "field" else y) - batch["y"]).square().mean()
        return loss * 2 if doubled == "loss" else loss


class InTurns(ComputesAlone):
    """With steps of its own."""

    def __init__(self, what):
        super().__init__(what)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("kind", "sharding"), [(ComputesAlone, "none"), (ComputesAlone, "full"), (InTurns, "none")]
)
@pytest.mark.parametrize("what", RANK_0_ALONE)
def test_what_one_rank_of_a_domain_computes_alone_is_refused(what, kind, sharding):
    """Else the mean of both gradients would train a network that nobody wrote."""
    with pytest.raises(ValueError, match=RANK_0_ALONE[what]):
        fit_sharded(kind(what), (2,), strategy={"sharding": sharding}, limit_val_batches=0)


@pytest.mark.spmd(2)
def test_replicas_may_compute_other_things_in_their_steps():
    """Their samples differ, and so may what a step makes of them."""
    fit_sharded(ComputesAlone("field"), (1,), limit_val_batches=0)


class PredictsAlone(Featured):
    """The first process doubles what it predicts."""

    def predict_step(self, batch, batch_idx):
        y = super().predict_step(batch, batch_idx)
        return y * 2 if self.global_rank == 0 else y


@pytest.mark.spmd(2)
def test_what_one_rank_predicts_alone_is_refused():
    runner = training.trainer((2,))
    with pytest.raises(ValueError, match="ranks have computed different steps"):
        runner.predict(PredictsAlone(), loader(4))


class Prints(Featured):
    """The first process looks at its part in each step."""

    def loss(self, batch):
        if self.global_rank == 0:
            y = batch["x"]
            self.seen = f"{y} {y.shape} {y.to_local().sum()} {y.grad}" + repr(y)
        return super().loss(batch)


@pytest.mark.spmd(2)
def test_one_rank_may_look_at_its_part_in_a_step():
    fit_sharded(Prints(), (2,), limit_val_batches=0)


@pytest.mark.spmd(2)
def test_a_step_that_an_exception_has_ended_is_not_compared():
    """The ranks of a run that is interrupted have come to different places of a step."""
    same, rank = SameSteps(), dist.get_rank()
    field = shard(torch.ones(4, 3), mesh_of(2), 0)
    same.begin([0, 1])
    with suppress(KeyboardInterrupt), same.one_step():
        if rank == 0:
            raise KeyboardInterrupt
        field.relu()
    same.begin([0, 1])
    same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)
    with same.one_step():
        field.relu() if rank else field.abs()
    with pytest.raises(ValueError, match=r"Tensor\.abs on split tensors 1 times, and rank 1 0"):
        same.compare(torch.device("cpu"), [0, 0], dist.group.WORLD)


class Counts(Featured):
    """Notes how many ranks each step sees."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def note(self, name):
        self.seen[name] = dist.get_world_size(), dist.get_rank()

    def training_step(self, batch, batch_idx):
        self.note("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("validation")

    def test_step(self, batch, batch_idx):
        self.note("test")

    def predict_step(self, batch, batch_idx):
        self.note("predict")


@pytest.mark.spmd(2)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_each_step_counts_data_replicas(sharding):
    """A module that predicts on rank 0 alone by this number would predict a part of a field."""
    module = Counts()
    runner = fit_sharded(module, (2,), strategy={"sharding": sharding})
    runner.test(module, loader(4), verbose=False)
    runner.predict(module, loader(4))
    assert module.seen == dict.fromkeys(["training", "validation", "test", "predict"], (1, 0))
    assert dist.get_world_size() == 2
