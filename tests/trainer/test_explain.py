"""The notes below errors name the way out of the case, and no other."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_shard import UnsupportedOperationError, whole_parameters
from lightning_shard.trainer.explain import explain
from tests.trainer.featured import Featured, assert_same_state, fit_alone, fit_sharded, loader
from tests.training import shared_path, trainer


class ByHand(Featured):
    """Writes into its parameters in a step, before the optimizer does."""

    def __init__(self, write):
        super().__init__()
        self.automatic_optimization = False
        self.write = write

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            self.write(self.network[0].weight)
        optimizer.step()


@pytest.mark.spmd(2)
def test_the_gradient_of_a_manual_step_is_a_shard():
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        fit_sharded(ByHand(lambda p: p.add_(p.grad)), (2,), strategy={"sharding": "full"})
    assert caught.value.__notes__[0].startswith("In a manual step p is whole and p.grad is a shard")


@pytest.mark.spmd(2)
def test_a_refusal_of_ours_has_no_note_of_the_optimizer():
    write = ByHand(lambda p: p.add_(p.grad.full_tensor()))
    with pytest.raises(RuntimeError, match="sharding='none' keeps parameters whole") as caught:
        fit_sharded(write, (2,), strategy={"sharding": "full"})
    assert not any("optimizer" in note for note in getattr(caught.value, "__notes__", ()))


class WritesBetweenSteps(Featured):
    """Adds a plain tensor to its parameters between two steps of manual optimization."""

    def __init__(self, opened):
        super().__init__()
        self.automatic_optimization = False
        self.opened = opened

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_train_batch_end(self, *_):
        with torch.no_grad(), self.opened(self):
            for p in self.network.parameters():
                p.add_(torch.full(p.shape, 0.01, dtype=p.dtype))


@pytest.mark.spmd(2)
def test_a_write_between_two_steps_by_hand():
    module, full = WritesBetweenSteps(nullcontext), {"sharding": "full"}
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        fit_sharded(module, (2,), strategy=full)
    (note,) = caught.value.__notes__
    assert "with lightning_shard.whole_parameters(module)" in note
    module, alone = WritesBetweenSteps(whole_parameters), WritesBetweenSteps(nullcontext)
    fit_sharded(module, (2,), strategy=full)
    fit_alone(alone)
    assert_same_state(module, alone)


class BegunAgain(Featured):
    """Gives a layer new first values between two steps."""

    def __init__(self, opened):
        super().__init__()
        self.opened = opened

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            torch.manual_seed(5)
            with self.opened(self):
                torch.nn.init.orthogonal_(self.network[0].weight)


@pytest.mark.spmd(2)
def test_first_values_that_torch_cannot_give_to_shards():
    full = {"sharding": "full"}
    with pytest.raises(RuntimeError, match="Sharding propagation failed") as caught:
        fit_sharded(BegunAgain(nullcontext), (2,), strategy=full)
    (note,) = caught.value.__notes__
    assert "with lightning_shard.whole_parameters(module)" in note
    module, alone = BegunAgain(whole_parameters), BegunAgain(nullcontext)
    fit_sharded(module, (2,), strategy=full)
    fit_alone(alone)
    assert_same_state(module, alone)


class ScalesGradients(Featured):
    """Makes gradients whole, and others of them, as surgery of gradients does."""

    def __init__(self, assign):
        super().__init__()
        self.assign = assign

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            self.assign(p, whole * 2)


def assign_whole(p, gradient):
    p.grad = gradient


def assign_a_shard(p, gradient):
    if isinstance(p, DTensor):
        gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
    p.grad.copy_(gradient)


@pytest.mark.spmd(2)
def test_a_whole_gradient_of_a_shard():
    for assign in (assign_whole, lambda p, gradient: p.grad.copy_(gradient)):
        with pytest.raises(RuntimeError, match="got mixed") as caught:
            fit_sharded(ScalesGradients(assign), (2,), strategy={"sharding": "full"})
        (note,) = caught.value.__notes__
        assert "distribute_tensor(whole, p.device_mesh, p.placements)" in note
        assert "AdamW" not in note
    runs = (assign_a_shard, "full"), (assign_whole, "none")
    alone = ScalesGradients(assign_whole)
    fit_alone(alone)
    for assign, mode in runs:
        module = ScalesGradients(assign)
        fit_sharded(module, (2,), strategy={"sharding": mode})
        assert_same_state(module, alone)


class WithHook(Featured):
    """Reads gradients in a hook."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def on_after_backward(self):
        self.log("found", self.read([p.grad for p in self.parameters()]))


def some_elements(gradients):
    weight = next(g for g in gradients if g.ndim == 4)
    return weight[weight > 0].sum()


@pytest.mark.spmd(2)
def test_a_function_that_torch_lacks_for_shards():
    with pytest.raises(RuntimeError) as caught:
        fit_sharded(WithHook(some_elements), (2,), strategy={"sharding": "full"})
    (note,) = caught.value.__notes__
    assert note.startswith("sharding='none' keeps parameters whole on each rank")
    assert "p.grad.full_tensor()" in note

    def in_whole(gradients):
        return some_elements([g.full_tensor() if isinstance(g, DTensor) else g for g in gradients])

    ways = (WithHook(in_whole), "full"), (WithHook(some_elements), "none")
    runs = [fit_sharded(module, (2,), strategy={"sharding": mode}) for module, mode in ways]
    found, expected = (run.callback_metrics["found"] for run in runs)
    torch.testing.assert_close(found, expected)


class InNumPy(torch.optim.SGD):
    """An optimizer that computes its step in NumPy."""

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.numpy()


class WithNumPy(Featured):
    def configure_optimizers(self):
        return InNumPy(self.parameters(), lr=0.1)


@pytest.mark.spmd(2)
def test_an_optimizer_in_numpy():
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses") as caught:
        fit_sharded(WithNumPy(), (2,), strategy={"sharding": "full"})
    (note,) = caught.value.__notes__
    assert note.startswith("sharding='none' keeps parameters whole on each rank")
    assert "p.grad.full_tensor().numpy()" in note
    fit_sharded(WithNumPy(), (2,), strategy={"sharding": "none"})


def test_a_file_that_another_rank_has_opened():
    error = BlockingIOError("Unable to synchronously create file (unable to lock file, errno = 11)")
    explain(error)
    (note,) = error.__notes__
    assert "Write it where self.trainer.is_global_zero" in note


def test_a_refusal_of_ours_behind_an_error_of_another_package():
    refusal = UnsupportedOperationError("a tensor split over ranks cannot be a MetaTensor")
    error = RuntimeError("applying transform EnsureType")
    error.__cause__ = ValueError("on the way")
    error.__cause__.__context__ = refusal
    explain(error)
    assert error.__notes__ == [str(refusal)]
    refusal.__context__ = UnsupportedOperationError("an earlier one")
    explain(refusal)
    assert not hasattr(refusal, "__notes__")


class Counts(Featured):
    def test_step(self, batch, batch_idx):
        with FlopCounterMode(display=False) as counter:
            super().test_step(batch, batch_idx)
        assert counter.get_total_flops() > 0


@pytest.mark.spmd(2)
def test_operations_counted_in_a_test_keep_its_other_numbers():
    """Each rank would count its own rows, which is said; the number of one process is unknown."""
    runner, alone = trainer((2,)), trainer((2,))
    with pytest.warns(UserWarning, match="counts the rows of this rank"):
        runner.test(Counts(), loader(4), verbose=False)
    alone.test(Featured(), loader(4), verbose=False)
    assert runner.callback_metrics == alone.callback_metrics


def test_the_largest_norm_of_an_empty_shard():
    with pytest.raises(RuntimeError) as caught:
        torch._foreach_norm([torch.zeros(0)], float("inf"))
    explain(caught.value)
    (note,) = caught.value.__notes__
    assert "sharding='none'" in note
    assert "gradient_clip_val" in note


def largest(gradients):
    return max(g.abs().amax() for g in gradients)


def largest_of_columns(gradients):
    return max(g.abs().amax(0).sum() for g in gradients if g.shape[:1] == (1,))


def as_list(gradients):
    return max(next(g for g in gradients if g.shape == (4,)).tolist())


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("read", "message"),
    [
        (largest, "Expected reduction dim"),
        (largest_of_columns, "Expected reduction dim 0 to have non-zero size"),
        (as_list, r"\.tolist\(\) is not supported"),
    ],
)
def test_what_torch_lacks_for_shards_in_a_hook(read, message):
    """The last rank has no part of a weight with one row."""
    with pytest.raises(Exception, match=r".") as caught:
        fit_sharded(WithHook(read), (2,), strategy={"sharding": "full"})
    if dist.get_rank() == 1:
        assert re.search(message, str(caught.value))
        assert "p.grad.full_tensor()" in caught.value.__notes__[0]

    def in_whole(gradients):
        return read([g.full_tensor() if isinstance(g, DTensor) else g for g in gradients])

    ways = (WithHook(in_whole), "full"), (WithHook(read), "none")
    runs = [fit_sharded(module, (2,), strategy={"sharding": mode}) for module, mode in ways]
    found, expected = (run.callback_metrics["found"] for run in runs)
    torch.testing.assert_close(found, expected)


@pytest.mark.spmd(2)
def test_a_resumed_run_with_too_few_epochs():
    path = shared_path("three_epochs.ckpt")
    fit_sharded(Featured(), (2,), max_epochs=3).save_checkpoint(path)
    runner = trainer((2,), max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"epoch=3, .*max_epochs=1") as caught:
        runner.fit(Featured(), loader(4), ckpt_path=path)
    assert caught.value.__notes__[0].startswith("max_epochs counts the epochs of the checkpoint")
    runner = trainer((2,), max_epochs=4)
    runner.fit(Featured(), loader(4), ckpt_path=path)
    assert runner.current_epoch == 4


class ChangesDtype(Featured):
    """Computes one layer in float32."""

    def forward(self, x):
        hidden = self.network[0](x.float()).double()
        return self.network[1:](hidden) * self.weight.sum() + self.offset


class ChangesDtypeLate(ChangesDtype):
    def on_fit_start(self):
        self.network[0].float()


class ChangesDtypeInSetup(ChangesDtype):
    def setup(self, stage):
        self.network[0].float()


@pytest.mark.spmd(2)
def test_a_dtype_that_is_changed_in_a_hook():
    with pytest.raises(AssertionError, match="uniform original parameter dtype") as caught:
        fit_sharded(ChangesDtypeLate(), (2,), strategy={"sharding": "full"})
    assert "in __init__, configure_model or setup" in caught.value.__notes__[0]
    ways = (ChangesDtypeInSetup(), "full"), (ChangesDtypeLate(), "none")
    runs = [fit_sharded(module, (2,), strategy={"sharding": mode}) for module, mode in ways]
    found, expected = (run.callback_metrics["loss"] for run in runs)
    torch.testing.assert_close(found, expected)


class OwnScaler(Featured):
    """Scales by a scaler of its own; the optimizer is given the parameters in an order."""

    def __init__(self, key):
        super().__init__()
        self.automatic_optimization, self.key = False, key
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(sorted(self.parameters(), key=self.key), lr=0.05)


@pytest.mark.spmd(2)
def test_a_scaler_of_shards_after_a_scalar():
    with pytest.raises(AttributeError, match="placements") as caught:
        fit_sharded(OwnScaler(lambda p: p.ndim), (2,), strategy={"sharding": "full"})
    assert "give it that one first" in caught.value.__notes__[0]
    ways = (OwnScaler(lambda p: -p.ndim), "full"), (OwnScaler(lambda p: p.ndim), "none")
    runs = [fit_sharded(module, (2,), strategy={"sharding": mode}) for module, mode in ways]
    found, expected = (run.callback_metrics["loss"] for run in runs)
    torch.testing.assert_close(found, expected)
