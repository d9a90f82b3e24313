"""What trains wrongly in silence elsewhere is right here, or refused with a sentence.

Each was seen on Lightning's own strategies for sharded models.
"""

import copy
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard import whole_parameters
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.processes.agreement import DisagreementError
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.reference import computed_once
from tests.trainer.featured import (
    QUIET,
    Featured,
    assert_same_state,
    fit_alone,
    fit_sharded,
    loader,
)
from tests.trainer.programs import Program


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.quick_rows("4x1")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(1,), (2,)], ids=["4x1", "2x2"])
def test_weights_of_rank_zero_whatever_the_seeds(domain):
    """Ranks with weights of their own would average gradients of different models."""
    alone, module = Featured(), Featured()
    if dist.get_rank():
        for p in module.parameters():
            nn.init.normal_(p)
    fit_alone(alone)
    fit_sharded(module, domain)
    assert_same_state(module, alone)


class MadeEarly(Featured):
    """The optimizer of `LightningCLI --optimizer`, made before the module is sharded."""

    def __init__(self):
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def configure_optimizers(self):
        return self.made


class OfAnotherModule(Featured):
    def configure_optimizers(self):
        return torch.optim.SGD(Featured().parameters(), lr=0.05)


@pytest.mark.spmd(2)
def test_optimizer_made_before_sharding():
    alone, module = MadeEarly(), MadeEarly()
    fit_alone(alone)
    fit_sharded(module, (2,))
    assert_same_state(module, alone)
    with pytest.raises(RuntimeError, match="would train nothing"):
        fit_sharded(OfAnotherModule(), (2,))


class BackwardByHand(Featured):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch["x"]) * self.weight.sum() - batch["y"]).square().mean()
        loss.backward()
        self.optimizers().step()


@pytest.mark.spmd(2)
def test_backward_without_the_strategy():
    """With shards it would train nothing: FSDP2 hears nothing of it."""
    full = {"sharding": "full"}
    with pytest.raises(RuntimeError, match=r"call self\.manual_backward\(loss\)"):
        fit_sharded(BackwardByHand(), (2,), strategy=full)
    alone, module = BackwardByHand(), BackwardByHand()
    fit_alone(alone)
    fit_sharded(module, (2,), strategy={"sharding": "none"})  # as the sentence says
    assert_same_state(module, alone)


class InferenceFirst(Callback):
    """Lets evaluation loops run in inference mode, as they do with a backend other than gloo."""

    def setup(self, trainer, module, stage):
        for loop in (trainer.validate_loop, trainer.test_loop):
            loop.inference_mode = True


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_evaluation_before_fit_leaves_parameters_trainable():
    alone, module = Featured(), Featured()
    fit_alone(alone)
    for stage in ("validate", "test"):
        runner = training.trainer((2,), callbacks=[InferenceFirst()])
        getattr(runner, stage)(module, loader(4), verbose=False)
        assert not any(p.is_inference() for p in module.parameters())
    fit_sharded(module, (2,))
    assert_same_state(module, alone)


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_statistics_are_those_of_rank_zero_in_files_and_after():
    """Replicas without sync_batchnorm differ; the file has rank 0's, and all go on with them."""
    path = shared_path("statistics.ckpt")
    module = Featured(nn.BatchNorm2d)
    runner = fit_sharded(module, (2,))
    here = module.network[1].running_mean.clone()
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]["network.1.running_mean"]
    means = everywhere(here.tolist())
    assert means[0] == means[1] != means[2]
    assert saved.tolist() == means[0]
    again = Featured(nn.BatchNorm2d)
    training.trainer((2,)).validate(again, loader(2), ckpt_path=path, verbose=False)
    assert everywhere(again.network[1].running_mean.tolist()) == [means[0]] * 4


def kept(folder, fit):
    """The run that keeps checkpoints of the best epochs, and its callback."""
    best = ModelCheckpoint(
        folder, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    steps = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    stop = EarlyStopping("val_loss", min_delta=0.02)
    runner = fit(Featured(), callbacks=[best, steps, stop], max_epochs=6, enable_checkpointing=True)
    return runner, best


@computed_once
def kept_alone():
    with tempfile.TemporaryDirectory() as folder:
        runner, best = kept(folder, fit_alone)
        return {
            "epoch": runner.current_epoch,
            "score": best.best_model_score.item(),
            "names": sorted(p.name for p in Path(folder).iterdir()),
            "state": Featured.load_from_checkpoint(best.best_model_path).state_dict(),
        }


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    "domain", [pytest.param((1,), marks=pytest.mark.slow), (2,)], ids=["4x1", "2x2"]
)
def test_checkpoints_of_the_best_epochs(domain):
    """Decisions that depend on a metric are the same on all ranks, and those of one process."""
    expected, mine = kept_alone(), shared_path("files")
    runner, best = kept(mine, lambda module, **options: fit_sharded(module, domain, **options))
    assert runner.current_epoch == expected["epoch"] < 6
    assert everywhere(best.best_model_path) == [best.best_model_path] * 4
    assert best.best_model_score.item() == pytest.approx(expected["score"], rel=1e-6)
    dist.barrier()
    assert sorted(p.name for p in mine.iterdir()) == expected["names"]
    assert_same_state(Featured.load_from_checkpoint(best.best_model_path), expected["state"])


class EpochEnd(Featured):
    """Calls a part of the network, and reads a parameter, in a hook."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def on_train_epoch_end(self):
        x = torch.ones(1, 1, 9, 7, dtype=torch.float64)
        if self.whole:
            with torch.no_grad(), whole_parameters(self):
                self.seen = self.network(x) * self.weight.sum()
        else:
            self.network(x)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_parameters_in_hooks():
    alone, module = EpochEnd(whole=True), EpochEnd(whole=True)
    alone.on_train_epoch_end = lambda: None
    fit_alone(alone)
    fit_sharded(module, (2,))
    with torch.no_grad():
        expected = alone.network(torch.ones(1, 1, 9, 7).double()) * alone.weight.sum()
    torch.testing.assert_close(module.seen, expected, rtol=1e-9, atol=1e-11)
    assert_same_state(module, alone)
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        fit_sharded(EpochEnd(whole=False), (2,), strategy={"sharding": "full"})
    assert "whole_parameters(module)" in caught.value.__notes__[0]


@pytest.mark.spmd(2)
def test_a_sharded_module_is_not_copied():
    """A callback that copies it at each stage is explained; its weights go on in a fresh one."""
    module = Featured()
    averages = StochasticWeightAveraging(0.01, 1)
    runner = fit_sharded(module, (2,), callbacks=[averages], strategy={"sharding": "full"})
    with pytest.raises(AssertionError, match="deepcopy") as caught:
        runner.test(module, loader(2), verbose=False)
    assert "StochasticWeightAveraging" in caught.value.__notes__[0]
    state = full_module_state(module)
    if dist.get_rank() == 0:  # which alone keeps it
        fresh = Featured()
        fresh.load_state_dict(state)
        alone = Trainer(devices=1, plugins=LightningEnvironment(), **QUIET)
        assert alone.validate(fresh, loader(2), verbose=False)


class Follows(Featured):
    """A teacher that follows its student inside of the step, as in MoCo and BYOL."""

    def __init__(self, how):
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.how = how

    def training_step(self, batch, batch_idx):
        for mine, its in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            if self.how == "in place":
                with torch.no_grad():
                    mine.mul_(0.9).add_(its, alpha=0.1)
            elif self.how == "data in place":
                mine.data.mul_(0.9).add_(its.data, alpha=0.1)
            else:
                mine.data = mine.data * 0.9 + its.data * 0.1
        if batch_idx == 1:  # of a second optimizer step
            self.network[0].weight.requires_grad_(False)
        with torch.no_grad():
            target = self.teacher(batch["x"])
        return self.loss(batch) + (self.network(batch["x"]) - target).square().mean()


@computed_once
def follows_alone(how):
    module = Follows(how)
    fit_alone(module, limit_train_batches=3)
    return module.state_dict()


@pytest.mark.quick_rows("data in place")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("how", ["in place", "data in place", "data assigned"])
def test_a_step_that_writes_into_parameters(how):
    module = Follows(how)
    fit_sharded(module, (2,), limit_train_batches=3, strategy={"sharding": "none"})
    assert_same_state(module, follows_alone(how))
    assert not module.network[0].weight.requires_grad


@pytest.mark.spmd(2)
@pytest.mark.parametrize("how", ["in place", "data in place"])
@pytest.mark.parametrize("policy", [None, {"param_dtype": "float32"}])
def test_a_step_that_writes_into_shards(policy, how):
    """FSDP2 would forget it after the step."""
    options = {"sharding": "full", "mp_policy": policy}
    with pytest.raises(RuntimeError, match=r"wrote into a sharded .* sharding='none'"):
        fit_sharded(Follows(how), (2,), strategy=options)


class ByHand(Featured):
    """Clips, reads and clears gradients through `self.parameters()`, as outside of Lightning."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.norms = []

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.norms.append(float(nn.utils.clip_grad_norm_(self.network.parameters(), 0.05)))
        self.norms += [float(p.grad.norm()) for p in self.parameters()]
        self.optimizers().step()
        for p in self.parameters():
            p.grad = None


class MovesShards(ByHand):
    """Moves along the gradient through the optimizer's parameters, as SAM does."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p in self.optimizers().param_groups[0]["params"]:
                p.add_(p.grad * 1e-3)
        self.manual_backward(self.loss(batch))


class PutsGradients(ByHand):
    """Gives parameters the gradients that it has computed itself, those of this rank."""

    def training_step(self, batch, batch_idx):
        parameters = list(self.network.parameters())
        found = torch.autograd.grad(self.loss(batch), parameters)
        for p, gradient in zip(parameters, found, strict=True):
            p.grad = gradient
        self.optimizers().step()


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_gradients_by_hand():
    """They lie with the shards; without them clipping by torch's own function did nothing."""
    alone, module = ByHand(), ByHand()
    fit_alone(alone)
    fit_sharded(module, (2,))
    assert module.norms == pytest.approx(alone.norms, rel=1e-9)
    assert_same_state(module, alone)
    alone, module = MovesShards(), MovesShards()
    fit_alone(alone)
    fit_sharded(module, (2,))
    assert_same_state(module, alone)
    alone, module = PutsGradients(), PutsGradients()
    fit_alone(alone)
    fit_sharded(module, (2,), strategy={"sharding": "full"})  # one replica has no mean to take
    assert_same_state(module, alone)
    with pytest.raises(RuntimeError, match=r"call self\.manual_backward\(loss\)") as caught:
        fit_sharded(PutsGradients(), (1,), strategy={"sharding": "full"})
    assert not any("optimizer" in note for note in getattr(caught.value, "__notes__", ()))


class BetweenSteps(ByHand):
    """A hook changes the optimizer's parameters."""

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            for p in self.optimizers().param_groups[0]["params"]:
                p.mul_(0.9)


class Hooked(Featured):
    def __init__(self, how):
        super().__init__()
        getattr(self.network[0].weight, how)(lambda gradient: None)


@pytest.mark.spmd(2)
def test_what_hooks_do_to_parameters():
    alone, module = BetweenSteps(), BetweenSteps()
    fit_alone(alone)
    fit_sharded(module, (2,))
    assert_same_state(module, alone)
    for how in ("register_hook", "register_post_accumulate_grad_hook"):
        with pytest.raises(NotImplementedError, match=r"network\.0\.weight has a hook"):
            fit_sharded(Hooked(how), (2,), strategy={"sharding": "full"})


class HookedLate(Featured):
    def on_train_start(self):
        self.network[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.spmd(2)
def test_hooks_of_parameters_that_are_registered_late():
    alone, module = HookedLate(), HookedLate()
    fit_alone(alone)
    fit_sharded(module, (2,), strategy={"sharding": "none"})
    assert_same_state(module, alone)
    with pytest.raises(NotImplementedError, match=r"weight of Conv2d has a hook .*'none'"):
        fit_sharded(HookedLate(), (2,), strategy={"sharding": "full"})


class NotesGradients(Featured):
    """A hook that runs after each backward pass, also between two steps."""

    def on_after_backward(self):
        for p in self.parameters():
            value = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            self.noted.append(value.norm())


class NotesOfACallback(Callback):
    def on_after_backward(self, trainer, module):
        NotesGradients.on_after_backward(module)


@pytest.mark.quick_rows("none-callback", "full-module")
@pytest.mark.parametrize("kind", ["module", "callback"])
@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.spmd(2)
def test_gradients_after_each_backward_of_an_accumulated_batch(sharding, kind):
    runs = []
    for fit in (fit_alone, partial(fit_sharded, domain=(2,), strategy={"sharding": sharding})):
        module = (NotesGradients if kind == "module" else Featured)()
        module.noted = []
        callbacks = [NotesOfACallback()] if kind == "callback" else []
        fit(module, accumulate_grad_batches=3, limit_train_batches=5, callbacks=callbacks)
        runs.append(torch.stack(module.noted))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=0)


class Flattens(Featured):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class CollectsNorms(Featured):
    def on_before_optimizer_step(self, optimizer):
        torch.tensor([p.grad.norm() for p in self.parameters() if p.grad is not None])


@pytest.mark.spmd(2)
def test_what_torch_refuses_of_shards_is_explained():
    for make, words in (
        (Flattens, "optimizer LBFGS cannot"),
        (CollectsNorms, "torch.tensor was given"),
    ):
        with pytest.raises(RuntimeError) as caught:
            fit_sharded(make(), (2,), strategy={"sharding": "full"})
        assert words in caught.value.__notes__[0]
        assert "sharding='none'" in caught.value.__notes__[0]


class ReadsBlocks(Program):
    """Computes with parameters of blocks in the step, after the blocks have run."""

    def step(self, batch, loss):
        found = torch.autograd.grad(loss, list(self.blocks.parameters()), create_graph=True)
        return loss + 0.01 * sum(
            g.square().sum() + p.square().sum()
            for g, p in zip(found, self.blocks.parameters(), strict=True)
        )


@pytest.mark.spmd(2)
def test_parameters_of_blocks_in_a_step_with_the_sharding_that_errors_name():
    alone, module = ReadsBlocks(), ReadsBlocks()
    fit_alone(alone, limit_train_batches=2)
    options = {"wrap": ["Block"], "sharding": "gradients"}
    fit_sharded(module, (2,), strategy=options, limit_train_batches=2)
    assert_same_state(module, alone)
    with pytest.raises(RuntimeError) as caught:
        fit_sharded(ReadsBlocks(), (2,), strategy={"wrap": ["Block"]}, limit_train_batches=1)
    assert "sharding='gradients'" in caught.value.__notes__[0]


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.model(x))


class Shared(Program):
    """Two siblings of one class hold one module, as a network and its target do."""

    def start(self):
        shared = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.a, self.b = Wrapper(shared), Wrapper(shared)

    def loss(self, batch):
        return (self.a(batch["x"]) - self.b(batch["x"])).square().mean()


@pytest.mark.quick_rows("['Sequential']")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("wrap", [["Wrapper"], ["Wrapper", "Conv2d"], ["Sequential"]], ids=str)
def test_one_module_inside_of_two_blocks(wrap):
    alone, module = Shared(), Shared()
    fit_alone(alone, limit_train_batches=3)
    fit_sharded(module, (2,), strategy={"wrap": wrap}, limit_train_batches=3)
    assert_same_state(module, alone)


class Remembers(Program):
    """Keeps parameters in a list from before they are sharded."""

    def start(self):
        object.__setattr__(self, "kept", [self.stem.weight, self.scale])

    def step(self, batch, loss):
        return loss + 0.1 * sum(p.square().sum() for p in self.kept)


@pytest.mark.spmd(2)
def test_parameters_that_are_kept_from_before():
    """Those of the module itself, if they are whole; those of shards nobody would train."""
    alone, module = Remembers(), Remembers()
    fit_alone(alone, limit_train_batches=2)
    fit_sharded(module, (2,), strategy={"sharding": "none"}, limit_train_batches=2)
    assert_same_state(module, alone)
    assert module.kept[0] is module.stem.weight
    assert module.kept[1] is module.scale
    for mode in ("full", "gradients"):
        module = Remembers()
        with pytest.raises(RuntimeError, match=r"square uses a parameter .* was kept, .*'none'"):
            fit_sharded(module, (2,), strategy={"sharding": mode}, limit_train_batches=2)
        assert module.kept[0].shape == (4, 1, 3, 3)
        assert module.kept[0].numel() == 36


class Grows(Featured):
    """Has one more parameter from its fifth batch on."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 4:
            self.late = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


@pytest.mark.spmd(2)
def test_a_parameter_that_comes_late_is_refused_among_shards():
    """Each rank would train its own; with whole parameters it is followed."""
    with pytest.raises(RuntimeError, match="late was made after the module was sharded"):
        fit_sharded(Grows(), (2,), strategy={"sharding": "full"}, max_epochs=1)


class CutsWindows(Featured):
    """Turns and cuts each batch at random, as an augmentation does in a step."""

    def loss(self, batch):
        start, turned = int(torch.randint(0, 4, ())), np.random.rand() < random.random()  # noqa: NPY002
        fields = [x.flip(2) if turned else x for x in (batch["x"], batch["y"])]
        x, y = (field[:, :, start : start + 6] for field in fields)
        return (self(x) - y).square().mean() + 0.1 * nn.functional.dropout(self.weight).sum()


class DrawsPictures(Callback):
    """Chooses on the first rank which sample to draw."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            torch.randperm(4)
            random.random()
            np.random.rand()  # noqa: NPY002

    def on_validation_batch_end(self, trainer, *args):
        self.on_train_batch_end(trainer)


@pytest.mark.quick_rows("1x2x2")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("domain", [(4,), (2, 2)], ids=["1x4", "1x2x2"])
def test_random_numbers_of_one_rank(domain):
    """Ranks of a domain would cut other windows out of one field."""
    modules = CutsWindows(), CutsWindows()
    for module, fit in zip(modules, (fit_alone, partial(fit_sharded, domain=domain)), strict=True):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3 + (module is modules[1]) * dist.get_rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, callbacks=[DrawsPictures()], max_epochs=2)
        said = [str(w.message) for w in caught if "have drawn random numbers" in str(w.message)]
        assert len(said) == (module is modules[1] and dist.get_rank() == 0)
    assert_same_state(modules[1], modules[0])


class ChangesOnOneRank(Callback):
    """Does on the first rank alone, after each batch, what a test gives it."""

    def __init__(self, change):
        self.change = change

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.is_global_zero:
            with torch.no_grad():
                self.change(pl_module)


def draws_a_picture(module):
    module(torch.ones(1, 1, 6, 6, dtype=torch.float64))


DRIFTS = {
    "parameter 'weight'": lambda module: module.weight.mul_(1.01),
    "buffer 'network.1.running_mean'": draws_a_picture,
}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("name", DRIFTS)
def test_a_network_that_changes_on_one_rank(name):
    """The ranks would go on with different networks."""
    module = Featured(norm=nn.BatchNorm2d)
    with pytest.raises(DisagreementError, match=f"the {name} differs.* on rank 0 and .* on rank 1"):
        fit_sharded(module, (2,), callbacks=[ChangesOnOneRank(DRIFTS[name])])


@pytest.mark.spmd(2)
def test_a_picture_drawn_in_eval_mode_on_one_rank():
    def draw(module):
        module.eval()
        draws_a_picture(module)
        module.train()

    alone, module = Featured(norm=nn.BatchNorm2d), Featured(norm=nn.BatchNorm2d)
    fit_alone(alone, callbacks=[ChangesOnOneRank(draw)])
    fit_sharded(module, (2,), callbacks=[ChangesOnOneRank(draw)])
    assert_same_state(module, alone)


class BegunByABatch(Featured):
    """Takes a parameter from its first batch, as an ActNorm does."""

    def __init__(self, common):
        super().__init__()
        self.common, self.is_new = common, True

    def training_step(self, batch, batch_idx):
        if self.is_new:
            with torch.no_grad():
                self.offset.copy_(self.common(self, batch["x"].mean()))
            self.is_new = False
        return super().training_step(batch, batch_idx)


@pytest.mark.spmd(2)
def test_a_parameter_that_a_step_takes_from_its_batch():
    """Data replicas have other samples: the mean of theirs is that of the whole batch."""

    def mean(module, value):
        return module.trainer.strategy.reduce(value, reduce_op="mean")

    with pytest.raises(DisagreementError, match=r"set it of its own samples.*strategy\.reduce"):
        fit_sharded(BegunByABatch(lambda _, value: value), (1,))
    alone, module = BegunByABatch(mean), BegunByABatch(mean)
    fit_alone(alone)
    fit_sharded(module, (1,))
    assert_same_state(module, alone)
