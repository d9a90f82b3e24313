"""The rehearsal of a user's module on this machine."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_modules import DarcyDataModule, TFNODarcy


class Net(LightningModule):
    def __init__(self, middle=torch.relu):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(4), middle

    def training_step(self, batch, batch_idx):
        loss = (self.second(self.middle(self.norm(self.first(batch["x"])))) - batch["y"]).square()
        self.log("loss", loss.mean())
        return loss.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def data(shape=(1, 12, 10), samples=4):
    return DataLoader(
        [{"x": torch.randn(shape), "y": torch.randn(shape)} for _ in range(samples)],
        2,
        shuffle=True,
    )


def test_a_module_that_runs(capfd):
    module = Net(nn.Dropout(0.3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batches, state = data(), torch.get_rng_state()
    found = lightning_shard.check(module, batches)
    assert torch.get_rng_state().equal(state)
    assert found.is_exact
    assert found.is_supported
    assert found.gradient_differences.keys() == before.keys()
    assert "One training step on 2 ranks equals that of one process" in str(found)
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert not capfd.readouterr().out


def test_a_module_of_a_data_module(tmp_path):
    small = {"train_resolution": 8, "num_train": 4, "num_val": 2, "num_test": 2, "batch_size": 2}
    module = TFNODarcy(n_modes=(4, 4), hidden_channels=4, n_layers=2)
    darcy = DarcyDataModule(root=str(tmp_path), **small)
    found = lightning_shard.check(module, darcy, domain_parallel_size=(2, 1))
    assert found.is_supported, str(found)
    assert "on 2x1 ranks" in str(found)


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


def test_an_operation_that_is_refused():
    found = lightning_shard.check(Net(lambda x: x.detach().apply_(abs) + x), data())
    assert not found.is_exact
    assert "apply_" in str(found)
    assert "the step stopped: cannot run" in str(found)


def test_rounding_is_told_from_mistakes():
    """A gradient that is the small difference of large sums."""

    class Cancels(Net):
        def training_step(self, batch, batch_idx):
            y = self.first(batch["x"])
            return 1e-4 * y.mean() + (10 * (y - y.mean(dim=(2, 3), keepdim=True))).mean()

    found = lightning_shard.check(Cancels(), data((1, 64, 64)))
    assert found.is_exact, str(found)
    assert found.rounding > 1e-4
    assert "These are of float64, since " in str(found)


def test_what_differs_is_said():
    class Local(Net):
        def training_step(self, batch, batch_idx):
            x = batch["x"]
            rows = x.to_local() if hasattr(x, "to_local") else x
            return super().training_step(batch, batch_idx) * (1 + rows.mean().abs())

    found = lightning_shard.check(Local(), data())
    assert not found.is_exact
    assert "DIFFERS FROM that of one process" in str(found)


def test_several_loaders_are_refused():
    with pytest.raises(ValueError, match="one DataLoader of training batches is needed; got list"):
        lightning_shard.check(Net(), [data(), data()])


def test_plan():
    module = Net()
    expected = lightning_shard.plan(module, data((1, 64, 64)), processes=4, domain_parallel_size=2)
    numbers = sum(p.numel() for p in module.parameters())
    assert expected.parameters == expected.gradients == numbers
    assert 2 * numbers <= expected.optimizer < 3 * numbers
    fields = 2 * 64 * 64 * 4 // 2  # bytes of one channel on one rank
    # inputs of the norm and of both convolutions (with a row of a neighbour), result of the
    # activation, difference
    assert expected.activations == pytest.approx((4 + 5 * 33 / 32 + 4 + 1) * fields, rel=0.02)
    assert expected.batch == 2 * fields
    assert expected.sent_for_parameters == 3 * 4 * numbers * 3 // 4
    halo = 2 * 64 * 4  # bytes of one row of one channel
    # of x and four channels one row forward, and of gradients of four channels backward
    assert 9 * halo <= expected.sent_for_fields <= 9 * halo + 2000
    alone = lightning_shard.plan(module, data((1, 64, 64)), processes=1)
    assert alone.activations == pytest.approx(9 * 2 * fields, rel=0.01)  # that result is the input
    assert alone.sent_for_parameters == alone.sent_for_fields == 0
    text = str(expected)
    assert "One of 4 ranks (2 data replicas x 2 domain ranks)" in text
    assert "measured on 2 ranks" in text


def test_plan_of_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="the 6 processes must be a multiple of the 4 ranks"):
        lightning_shard.plan(Net(), data(), processes=6, domain_parallel_size=(2, 2))
