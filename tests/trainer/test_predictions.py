"""Predictions in dataset order: one Zarr file written slab by slab, or in memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader

from lightning_shard import PredictionWriter, predictions_in_order
from lightning_shard.trainer.explain import explain
from lightning_shard.trainer.profile.traffic import counted
from tests import training
from tests.checkpoint.test_resume_inside_epoch import shared_path
from tests.trainer.featured import Featured, loader, sample
from tests.trainer.test_streams import Stream
from tests.training import Fields

MESHES = pytest.mark.parametrize(
    "domain", [(1,), (2,), (4,), (2, 2)], ids=["4x1", "2x2", "1x4", "1x(2x2)"]
)


class Predicts(Featured):
    def predict_step(self, batch, batch_idx):
        field = self(batch["x"])
        return {"field": field, "mean": field.mean((1, 2, 3)), "half": field.bfloat16()}


def expected(samples):
    module = Featured()
    with torch.no_grad():
        return module(torch.stack([sample(i)["x"] for i in range(samples)]))


@pytest.mark.quick_rows("uneven-4x1", "uneven-2x2", "one each-4x1", "one each-2x2")
@pytest.mark.spmd(4)
@MESHES
@pytest.mark.parametrize("samples", [7, 4], ids=["uneven", "one each"])
def test_one_file_in_dataset_order(domain, samples):
    path = shared_path("predictions.zarr")
    runner = training.trainer(domain, callbacks=[PredictionWriter(path)])
    assert runner.predict(Predicts(), loader(2, samples), return_predictions=False) is None
    written = zarr.open_group(path, mode="r")
    fields = expected(samples)
    assert not path.with_name("predictions.zarr.part").exists()
    for name, value in {"field": fields, "mean": fields.mean((1, 2, 3))}.items():
        torch.testing.assert_close(
            torch.from_numpy(written[name][:]), value, rtol=1e-10, atol=1e-12
        )
    assert torch.equal(torch.from_numpy(written["half"][:]), fields.bfloat16().float())


class Counting(PredictionWriter):
    sent = 0

    def write_on_batch_end(self, *args):
        with counted() as traffic:
            super().write_on_batch_end(*args)
        self.sent += traffic.bytes


@pytest.mark.spmd(4)
def test_few_rows_move():
    """Of 9 rows the ranks hold 3 2 2 2, and a file of equal chunks wants 3 3 3 0."""
    writer = Counting(shared_path("predictions.zarr"))
    runner = training.trainer((4,), callbacks=[writer])
    runner.predict(Featured(), loader(1, 1), return_predictions=False)
    row = 7 * 8
    assert writer.sent == (0, 0, 1, 2)[dist.get_rank()] * row


@pytest.mark.quick_rows("4x1-in order", "2x2-shuffled")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@MESHES
def test_in_memory(domain, shuffle):
    runner, module = training.trainer(domain), Predicts()
    torch.rand(dist.get_rank())  # each rank would draw another order
    data = DataLoader(Fields(sample, 7), 2, shuffle=shuffle)
    found = predictions_in_order(runner, runner.predict(module, data))
    assert len(found) == 7
    for one, field in zip(found, expected(7), strict=True):
        torch.testing.assert_close(one["field"], field, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one["mean"], field.mean(), rtol=1e-10, atol=1e-12)


@dataclass
class Record:
    field: torch.Tensor
    names: list[str]
    step: int
    mean: torch.Tensor


class Records(Featured):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        field = self(batch["x"])
        names = [f"{x.sum():.9f}" for x in batch["x"]]
        return Record(field, names, 7, field.mean((1, 2, 3)))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("domain", [1, 2])
@pytest.mark.parametrize("kind", [list, dict])
def test_several_loaders_of_records(domain, kind):
    runner = training.trainer((domain,))
    data = [DataLoader(Fields(sample, n), 2, shuffle=True) for n in (3, 6)]
    given = data if kind is list else dict(zip("ab", data, strict=True))
    returned = runner.predict(Records(), given)
    for batches, samples in zip(returned, (3, 6), strict=True):
        found = predictions_in_order(runner, batches)
        assert len(found) == samples
        for number, (one, field) in enumerate(zip(found, expected(samples), strict=True)):
            torch.testing.assert_close(one.field, field, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(one.mean, field.mean(), rtol=1e-10, atol=1e-12)
            assert (one.names, one.step) == (f"{sample(number)['x'].sum():.9f}", 7)
    for unlike in (returned, [*returned[0]]):
        with pytest.raises(ValueError, match=r"read 2 dataloaders .* give one of these lists"):
            predictions_in_order(runner, unlike)


@pytest.mark.spmd(1)
def test_predictions_of_an_earlier_run_are_refused():
    """The order of another loader had been taken for theirs, and what it has not was left out."""
    runner, module = training.trainer((1,)), Featured()
    earlier = runner.predict(module, loader(2, 6))
    runner.predict(module, loader(2, 4))
    with pytest.raises(ValueError, match=r"of 3 batches, .* predicted 2 batches: .*call"):
        predictions_in_order(runner, earlier)
    last = runner.predict(module, loader(2, 6))
    assert len(predictions_in_order(runner, last)) == 6
    runner.test(module, loader(2, 4), verbose=False)
    with pytest.raises(ValueError, match=r"of 3 batches, .* predicted none: .*before the trainer"):
        predictions_in_order(runner, last)


class Returns(Featured):
    def predict_step(self, batch, batch_idx):
        return self.made


@pytest.mark.spmd(1)
def test_what_belongs_to_no_sample():
    runner, module = training.trainer((1,)), Returns()
    module.made = {"scale": torch.tensor(2.0), "array": np.arange(2), "nothing": None}
    found = predictions_in_order(runner, runner.predict(module, loader(2, 2)))
    assert [(float(x["scale"]), int(x["array"]), x["nothing"]) for x in found] == [
        (2.0, 0, None), (2.0, 1, None)
    ]  # fmt: skip
    module.made = torch.arange(7.0)
    batches = runner.predict(module, loader(2, 2))
    with pytest.raises(ValueError, match=r"shape \(7,\) for a batch of 2 samples; return tensors"):
        predictions_in_order(runner, batches)


@pytest.mark.spmd(2)
def test_existing_predictions_are_kept():
    path = shared_path("predictions.zarr")
    for overwrite in (False, True):
        runner = training.trainer((2,), callbacks=[PredictionWriter(path, overwrite)])
        runner.predict(Predicts(), loader(2, 3), return_predictions=False)
    runner = training.trainer((2,), callbacks=[PredictionWriter(path)])
    with pytest.raises(FileExistsError, match="overwrite=True"):
        runner.predict(Predicts(), loader(2, 3))


class Words(Featured):
    def predict_step(self, batch, batch_idx):
        return {"name": "a word"}


@pytest.mark.spmd(2)
def test_what_cannot_be_written_is_refused():
    path = shared_path("predictions.zarr")
    runner = training.trainer((2,), callbacks=[PredictionWriter(path)])
    with pytest.raises(ValueError, match="'name' of type str"):
        runner.predict(Words(), loader(2, 3))
    assert not path.exists()
    runner = training.trainer((2,), callbacks=[PredictionWriter(path)])
    stream = torch.utils.data.DataLoader(Stream([4, 4]), 2)
    with pytest.raises(ValueError, match=r"reads a stream.*; give it a batch size and a dataset"):
        runner.predict(Predicts(), stream)
    dist.barrier()


def test_fewer_samples_than_replicas_are_explained():
    with pytest.raises(AssertionError) as caught:
        UnrepeatedDistributedSampler(range(2), num_replicas=4, rank=3)
    explain(caught.value)
    assert "fewer samples than there are data replicas" in caught.value.__notes__[0]
