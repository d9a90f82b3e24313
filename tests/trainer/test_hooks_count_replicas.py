"""In every hook of a run torch.distributed counts data replicas, as the Trainer does."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, IterableDataset

from tests.training import trainer

FIELDS = torch.randn(8, 1, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Counted:
    """What each hook has counted: processes, the number of this one, and a sum over all."""

    def __init__(self):
        self.counted = {}

    def count(self, hook, trainer):
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, dist.get_rank())
        self.counted[hook] = (trainer.world_size, len(names), names, float(total))


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(1, 2, 3, padding=1).double()
        self.seen = Counted()
        self.squares, self.mean = torch.zeros(2, dtype=torch.float64), None

    def forward(self, x):
        return self.layer(x)

    def training_step(self, x, _):
        self.seen.count("training_step", self.trainer)
        return self(x).square().mean()

    def validation_step(self, x, _):
        self.seen.count("validation_step", self.trainer)

    def test_step(self, x, batch_idx):
        for each in x:
            self.squares += torch.stack([self(each[None]).square().mean(), x.new_ones(())])

    def on_test_epoch_end(self):
        # the ways of programs that were written for DDP
        total = self.squares.clone()
        dist.all_reduce(total)
        self.mean = total[0] / total[1]
        mean = self.squares[0] / self.squares[1]
        dist.all_reduce(mean)
        by_devices = mean / self.trainer.world_size
        assert torch.allclose(by_devices, mean / dist.get_world_size(), rtol=1e-12)
        assert torch.allclose(by_devices, self.mean, rtol=1e-12)
        assert total[1] == len(FIELDS), "each sample counts once"

    def configure_optimizers(self):
        self.seen.count("configure_optimizers", self.trainer)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        self.seen.count("train_dataloader", self.trainer)
        return DataLoader(Shards(), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


def counting(hook):
    def count(self, *_, **__):
        self.seen.count(hook, self.trainer)

    return count


for each in ("setup", "configure_model", "teardown", *dir(LightningModule)):
    is_hook = each.startswith("on_") and "transfer" not in each and each not in vars(Net)
    if is_hook or each in ("setup", "configure_model", "teardown"):
        setattr(Net, each, counting(each))


class Shards(IterableDataset):
    """The fields of one process, as a stream of files is shared out."""

    def __iter__(self):
        yield from FIELDS[dist.get_rank() :: dist.get_world_size()]


class WritesOnce(Callback):
    """Writes on one process, and reads on all after a barrier."""

    def __init__(self, folder):
        self.path = Path(folder) / "found.json"

    def on_fit_end(self, trainer, pl_module):
        dist.barrier()
        if trainer.is_global_zero:
            assert not self.path.exists()
            self.path.write_text(json.dumps({"replicas": trainer.world_size}))
        dist.barrier()
        assert json.loads(self.path.read_text()) == {"replicas": 2}
        dist.barrier(group=dist.group.WORLD)
        with pytest.raises(RuntimeError, match=r"all_reduce over .*WORLD in a step or hook"):
            dist.all_reduce(torch.ones(1), group=dist.group.WORLD)


@pytest.mark.spmd(4)
def test_each_hook_of_a_run(tmp_path):
    module, rank = Net(), dist.get_rank()
    expected = module.layer.weight.detach().clone()
    runner = trainer((2,), callbacks=[WritesOnce(tmp_path)])
    runner.fit(module)
    assert runner.global_step == 2  # of 8 samples on 2 replicas, in batches of 2
    assert not module.layer.weight.equal(expected)
    assert {"setup", "train_dataloader", "on_fit_end", "teardown"} < module.seen.counted.keys()
    assert len(module.seen.counted) > 25
    for hook, found in module.seen.counted.items():
        assert found == (2, 2, [0, 1], 3.0), hook
    assert (dist.get_world_size(), dist.get_rank()) == (4, rank), "a run has ended"


@pytest.mark.spmd(4)
def test_a_mean_over_replicas_in_a_hook():
    module = Net()
    expected = torch.stack([module.layer(each[None]).square().mean() for each in FIELDS]).mean()
    trainer((2,)).test(module, verbose=False)
    assert torch.allclose(module.mean, expected, rtol=1e-10)


class FailsInAHook(Net):
    def on_train_batch_start(self, *_):
        raise KeyError("of the user")


@pytest.mark.spmd(4)
def test_a_run_that_fails_counts_processes_again():
    with pytest.raises(KeyError, match="of the user"):
        trainer((2,)).fit(FailsInAHook())
    assert dist.get_world_size() == 4
