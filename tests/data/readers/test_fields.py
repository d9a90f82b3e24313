"""Each rank reads its part of each sample from disk, and training is that on whole fields."""

import contextlib
import io
import math
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, default_collate
from zarr.storage import LocalStore

import lightning_shard
from lightning_shard import (
    DomainTensor,
    FieldDataset,
    FieldFile,
    HybridShardStrategy,
    slab_of,
    write_fields,
)
from lightning_shard.checkpoint.state import full_module_state
from lightning_shard.data.same_batch import check_same_batch
from lightning_shard.data.split import shard_batch
from tests import training
from tests.pairs import choose
from tests.parity import mesh_of

SAMPLES = 4


def field(index: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(index).standard_normal(shape).astype(dtype)


def written(suffix: str, shape: tuple[int, ...]) -> Path:
    """A file with SAMPLES fields x and y, made by the first rank."""
    path = training.shared_path(f"fields{suffix}")
    if dist.get_rank() == 0:
        x = np.stack([field(i, shape) for i in range(SAMPLES)])
        write_fields(path, SAMPLES, [{"x": x[:3], "y": 2 * x[:3]}, {"x": x[3:], "y": 2 * x[3:]}])
    dist.barrier()
    return path


class FieldsOnDisk(LightningDataModule):
    def __init__(self, path, batch_size=2, **options):
        super().__init__()
        self.path, self.batch_size, self.options = path, batch_size, options

    def setup(self, stage):
        self.dataset = FieldDataset(self.path, trainer=self.trainer, **self.options)

    def train_dataloader(self):
        return DataLoader(self.dataset, self.batch_size)


class Compare(LightningModule):
    """Checks what it is given; trains one convolution."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.net, self.seen = shape, torch.nn.Conv2d(1, 1, 3, padding=1), []

    def training_step(self, batch, batch_idx):
        samples = [field(i, self.shape) for i in range(SAMPLES)]
        corners = [sample.flat[0] for sample in samples]
        found = {name: lightning_shard.gather(batch[name]).numpy() for name in ("x", "y")}
        wanted = np.stack([samples[corners.index(x.flat[0])] for x in found["x"]])
        np.testing.assert_array_equal(found["x"], wanted)
        np.testing.assert_array_equal(found["y"], 2 * wanted)
        for field_read in batch.values():
            assert isinstance(field_read, DomainTensor) == (self.trainer.strategy.domain_size > 1)
        self.seen.append(batch_idx)
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counted(io.FileIO):
    """A file that counts what is read of it."""

    total = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        Counted.total += count
        return count


@contextlib.contextmanager
def bytes_counted():
    """Counts what this process reads of HDF5 files and Zarr stores."""
    Counted.total, open_file, get = 0, h5py.File, LocalStore.get

    async def counted_get(self, *args, **kwargs):
        found = await get(self, *args, **kwargs)
        Counted.total += 0 if found is None else len(found)
        return found

    def opened(path, mode):
        return open_file(Counted(str(path), "r"), mode)

    with mock.patch.object(h5py, "File", opened), mock.patch.object(LocalStore, "get", counted_get):
        yield


@pytest.mark.quick_rows("(1,)-.h5")
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("domain", "suffix"), choose([(1,), (2,), (4,), (2, 2)], [".h5", ".zarr"]), ids=str
)
def test_each_rank_reads_its_part(domain, suffix):
    shape = (1, 250, 190)  # not divisible, neither by the ranks nor by the blocks of the file
    path, module = written(suffix, shape), Compare(shape)
    with bytes_counted():
        training.trainer(domain).fit(module, datamodule=FieldsOnDisk(path))
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    size = sum(file.stat().st_size for file in files)
    share = Counted.total / (size / 4 * math.prod(domain))  # of the samples of its data replica
    part = 1 / math.prod(domain)
    assert 0.9 * part < share < part + 0.12, (share, part)
    assert module.seen


@pytest.mark.slow_rows("(1, 3, 8)-.zarr")
@pytest.mark.spmd(4)
@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize("shape", [(1, 3, 8), (1, 7, 1)], ids=str)
def test_more_ranks_than_rows(shape, suffix):
    module = Compare(shape)
    runner = training.trainer((4,))
    data = FieldsOnDisk(written(suffix, shape))
    runner.fit(module, datamodule=data)
    assert module.seen == [0, 1]
    rows = data.dataset.slabs["x"].index[1]
    assert rows.stop - rows.start == (shape[1] + 3 - dist.get_rank()) // 4


@pytest.mark.slow
@pytest.mark.spmd(4)
@pytest.mark.parametrize(
    ("domain", "suffix"),
    [pytest.param((4,), ".zarr", marks=pytest.mark.slow), ((2, 2), ".h5"), ((2,), ".zarr")],
    ids=str,
)
def test_training_on_parts_is_training_on_whole_fields(domain, suffix):
    """Losses and weights equal those of a loop of one process, written by hand."""
    count = training.STEPS * 4
    path = training.shared_path(f"darcy{suffix}")
    if dist.get_rank() == 0:
        samples = [training.darcy_sample(i) for i in range(count)]
        block = {name: np.stack([s[name].numpy() for s in samples]) for name in ("x", "y")}
        write_fields(path, count, [block])
    wanted, state = training.train_alone("tfno", torch.float64, 4)
    dist.barrier()
    module, losses = training.make("tfno", torch.float64), training.Losses()
    replicas = 4 // math.prod(domain)
    data = FieldsOnDisk(path, batch_size=4 // replicas, dtype=torch.float64)
    data.train_dataloader = lambda: DataLoader(data.dataset, data.batch_size)
    training.trainer(domain, callbacks=[losses]).fit(module, datamodule=data)
    mean = torch.tensor(losses.values, dtype=torch.float64)
    dist.all_reduce(mean)
    torch.testing.assert_close((mean / 4).tolist(), wanted, rtol=1e-10, atol=0)
    for name, value in full_module_state(module).items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-10)


@pytest.mark.quick_rows(".h5")
@pytest.mark.spmd(2)
@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_workers_open_the_file_for_themselves(suffix):
    # the ranks of the pool are daemons, which may have no children such as workers
    multiprocessing.current_process()._config["daemon"] = False
    shape = (1, 20, 6)
    module, data = Compare(shape), FieldsOnDisk(written(suffix, shape))

    def loader():
        data.dataset[0]  # this process has it open, too
        return DataLoader(data.dataset, 2, num_workers=2, persistent_workers=True)

    data.train_dataloader = loader
    try:
        training.trainer((2,), max_epochs=2).fit(module, datamodule=data)
    finally:
        multiprocessing.current_process()._config["daemon"] = True
    assert module.seen == [0, 1, 0, 1]


@pytest.mark.spmd(2)
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_precision_reaches_the_parts(precision):
    path, dtypes = written(".h5", (1, 8, 6)), []

    class Dtypes(Compare):
        def training_step(self, batch, batch_idx):
            dtypes.append(batch["x"].dtype)
            return (self.net(batch["x"]) - batch["y"]).square().mean()

    training.trainer((2,), precision=precision).fit(
        Dtypes((1, 8, 6)), datamodule=FieldsOnDisk(path)
    )
    assert set(dtypes) == {torch.bfloat16 if precision == "bf16-true" else torch.float64}


@pytest.mark.spmd(2)
def test_ranks_that_read_different_samples_are_noticed():
    runner = training.trainer((2,))
    runner.fit(Compare((1, 8, 6)), datamodule=FieldsOnDisk(written(".h5", (1, 8, 6))))
    slab = slab_of(runner, "x", (1, 8, 6))
    rows = torch.zeros(1, 4, 6)
    batches = [{"x": slab.part(rows, sample)} for sample in (0, dist.get_rank())]
    check_same_batch(batches[0], mesh_of(2))
    with pytest.raises(ValueError, match=r"read different batches \(entry \['x'\]\)"):
        check_same_batch(batches[1], mesh_of(2))


@pytest.mark.spmd(2)
@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_ranks_that_read_different_files_are_noticed(suffix):
    paths = [training.shared_path(f"{name}{suffix}") for name in ("this", "that")]
    if dist.get_rank() == 0:
        for path in paths:
            write_fields(path, 1, [{"x": field(0, (1, 1, 8, 6))}])
    dist.barrier()
    batches = [FieldDataset(path, ["x"], mesh_of(2))[0] for path in paths]
    check_same_batch(batches[0], mesh_of(2))
    with pytest.raises(ValueError, match=r"read different batches .* and from the same files"):
        check_same_batch(batches[dist.get_rank()], mesh_of(2))


def split_by(shard_dims):
    """A trainer whose strategy has a domain of two ranks."""
    return SimpleNamespace(
        strategy=SimpleNamespace(
            domain_size=2, domain_mesh=mesh_of(2), device_mesh=mesh_of(2), shard_dims=shard_dims
        )
    )


@pytest.mark.spmd(2)
@pytest.mark.parametrize("dims", [3, -1, [3], {"x": 3}, {"x": [-1], "z": None}], ids=str)
def test_shard_dims_decide_what_is_read(dims):
    runner = split_by(dims)
    slab = slab_of(runner, "x", (1, 4, 6))
    low = 3 * dist.get_rank()
    assert slab.index == (slice(0, 1), slice(0, 4), slice(low, low + 3))
    whole = torch.rand(2, 1, 4, 6)
    parts = [{"x": slab.part(whole[i][slab.index], i), "z": i} for i in range(2)]
    batch = shard_batch(default_collate(parts), mesh_of(2), dims)
    assert lightning_shard.gather(batch["x"]).equal(whole)


@pytest.mark.spmd(2)
def test_what_is_not_split_is_read_whole():
    for dims, dtype in (({"y": 2}, torch.float32), ({"x": None}, torch.float32), (None, torch.int)):
        slab = slab_of(split_by(dims), "x", (1, 4, 6), dtype)
        assert not slab.is_split
        assert slab.part(torch.ones(1, 4, 6), 0).equal(torch.ones(1, 4, 6))
    assert not slab_of(split_by(None), "x", (4,)).is_split
    assert not slab_of(None, "x", (1, 4, 6)).is_split


@pytest.mark.spmd(2)
def test_slabs_that_do_not_fit_their_batch():
    with pytest.raises(ValueError, match="splits dim 0, the samples, of which no part can be read"):
        slab_of(split_by({"x": 0}), "x", (1, 4, 6))
    with pytest.raises(ValueError, match=r"dims \[4\] must lie in a tensor of 4 dims"):
        slab_of(split_by({"x": 4}), "x", (1, 4, 6))
    slab = slab_of(split_by(None), "x", (1, 4, 6))
    rows = torch.zeros(1, 2, 6)
    batch = default_collate([{"x": rows, "z": slab.part(rows, 0)}])
    with pytest.raises(ValueError, match=r"'z' of shape \(1, 1, 4, 6\) was read in parts, but"):
        shard_batch(batch, mesh_of(2), {"x": 2})
    other = slab_of(split_by(None), "x", (1, 4, 8))
    with pytest.raises(ValueError, match=r"must have one shape; got \(1, 4, 6\) and \(1, 4, 8\)"):
        default_collate([slab.part(rows, 0), other.part(torch.zeros(1, 2, 8), 1)])


def test_slabs_before_there_are_ranks():
    runner = SimpleNamespace(strategy=HybridShardStrategy(domain_parallel_size=2))
    with pytest.raises(
        RuntimeError, match=r"part of 'x' a rank reads is known once .* in setup\(\)"
    ):
        slab_of(runner, "x", (1, 4, 6))


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_files_that_cannot_be_read(tmp_path, suffix):
    path = tmp_path / f"fields{suffix}"
    with pytest.raises(FileNotFoundError, match=f"the file of fields {path} does not exist"):
        FieldDataset(path)
    (path.mkdir if suffix == ".zarr" else path.touch)()
    with pytest.raises(ValueError, match=f"{path} is not a whole (HDF5 file|Zarr group)"):
        FieldDataset(path)
    path = tmp_path / f"whole{suffix}"
    write_fields(path, 2, [{"x": np.ones((2, 1, 8, 8), "f4")}])
    with pytest.raises(ValueError, match=r"needs datasets x and y, but has no y; got \['x'\]"):
        FieldDataset(path)
    with pytest.raises(ValueError, match="holds 2 samples, but sample 4 is asked for"):
        FieldDataset(path, ["x"], samples=range(5))
    with pytest.raises(ValueError, match=r"must end in \.h5, \.hdf5, \.zarr"):
        FieldDataset(tmp_path / "fields.csv")
    assert FieldDataset(path, {"field": "x"})[1]["field"].equal(torch.ones(1, 8, 8))


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_written_as_arrays(suffix, dtype, tmp_path):
    path, values = tmp_path / f"fields{suffix}", torch.arange(12.0).reshape(2, 1, 2, 3).to(dtype)
    write_fields(path, 2, [{"x": values.requires_grad_()}])
    assert FieldDataset(path, ["x"])[1]["x"].equal(values[1].float())


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_a_number_for_each_sample(suffix, tmp_path):
    path = tmp_path / f"fields{suffix}"
    write_fields(path, 2, [{"x": field(0, (2, 1, 4, 4)), "y": np.arange(2)}])
    assert FieldDataset(path)[1]["y"].tolist() == [1.0]
    with pytest.raises(ValueError, match="x has values of <U1, which are no numbers"):
        write_fields(path, 1, [{"x": np.array([["a"]])}])


@pytest.mark.parametrize("dtype", ["f4", "i2", "?", "c8"])
def test_blocks_that_are_gone_are_no_zeros(dtype, tmp_path):
    path = tmp_path / "fields.zarr"
    values = np.ones((3, 1, 8, 8), dtype)
    values[2] = 0
    write_fields(path, 3, [{"x": values}])
    (path / "x/c/1/0/0/0").unlink()
    dataset = FieldDataset(path, ["x"], dtype=torch.complex64)
    assert [dataset[number]["x"].sum() for number in (0, 2)] == [64, 0]
    with pytest.raises(ValueError, match=r"sample 1 .* is damaged .* restore the file, or"):
        dataset[1]
    with pytest.raises(ValueError, match="is damaged"):
        list(FieldFile(path).blocks(["x"], 3, 2))


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_entries_of_several_numbers_of_samples(suffix, tmp_path):
    path, values = tmp_path / f"fields{suffix}", field(0, (6, 1, 4, 4))
    if suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = values, values[:5]
    else:
        root = zarr.open_group(path, mode="w")
        root.create_array("x", data=values)
        root.create_array("y", data=values[:5])
    with pytest.raises(ValueError, match=r"holds 6 of x, 5 of y, .* give samples=range\(5\)"):
        FieldDataset(path)
    assert len(FieldDataset(path, samples=range(5))) == 5
    for samples in (range(-1, 2), range(3, 6)):
        with pytest.raises(ValueError, match=r"holds 5 samples, but sample .* from 0 to 4"):
            FieldDataset(path, samples=samples)
    assert len(FieldDataset(path, "x", samples=np.array([5, 0]))) == 2
    for samples in (np.array([True, False]), [0.0, 1.0], 4, "34"):
        with pytest.raises(TypeError, match=r"must be the numbers of samples.* got"):
            FieldDataset(path, ["x"], samples=samples)
    with pytest.raises(TypeError, match=r"must be a torch.dtype, such as .* got 'float32'"):
        FieldDataset(path, ["x"], dtype="float32")
    with pytest.raises(ValueError, match="entries must name one array"):
        FieldDataset(path, [])


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_gaps_are_no_damage(tmp_path, suffix, dtype):
    values = field(0, (2, 1, 20, 8), dtype)
    values[:, :, :12] = np.nan  # whole blocks, and parts of others
    write_fields(tmp_path / f"x{suffix}", 2, [{"x": values}])
    found = FieldDataset(tmp_path / f"x{suffix}", ["x"], dtype=torch.float64)[1]["x"]
    np.testing.assert_array_equal(found, values[1])


@pytest.mark.parametrize("fill", [None, float("nan"), 0.0])
def test_gaps_in_files_of_others(tmp_path, fill):
    values = field(0, (2, 1, 6, 8))
    values[1, 0, :2] = np.nan
    root = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    array = root.create_array(
        "x", shape=values.shape, dtype="f4", chunks=(1, 1, 2, 8), fill_value=fill
    )
    array[:] = values
    found = torch.stack([each["x"] for each in FieldDataset(tmp_path / "x.zarr", ["x"])])
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_blocks_that_do_not_fit_are_refused(tmp_path, suffix):
    path, x = tmp_path / "a folder" / f"ü{suffix}", np.ones((2, 1, 8, 8), "f4")
    for blocks in (
        [{"x": x}, {"x": x}],
        [{"x": x[:1]}, {"x": x[:1, :, :1]}],
        [{"x": x[:1].astype(int)}, {"x": x[:1]}],
        [{"x": x[:1]}, {"y": x[:1]}],
        [{"x": x[:1], "y": x[:1]}, {"x": x[:1]}],
        [{"x": x, "y": x[:1]}],
    ):
        with pytest.raises(ValueError, match=r"do not belong into .* but each block must have"):
            write_fields(path, 3, blocks)
        assert not path.exists()
    with pytest.raises(ValueError, match="was given 2 of 3 samples; give blocks of all"):
        write_fields(path, 3, [{"x": x}])
    assert not path.exists()
    write_fields(path, 3, [{"x": x}, {"x": x[:1]}])
    assert len(FieldDataset(path, ["x"])) == 3
    with pytest.raises(ValueError, match=r"must end in \.h5"):
        write_fields(tmp_path / "x.nc", 3, [{"x": x}])


def test_numbers_that_torch_or_the_dtype_cannot_hold(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["long"] = np.arange(32, dtype=np.longdouble).reshape(1, 2, 4, 4)
        file["complex"] = np.full((1, 2, 4, 4), 1 + 2j)
    assert FieldDataset(tmp_path / "x.h5", ["long"])[0]["long"].sum() == 496
    with pytest.raises(ValueError, match=r"complex numbers, of which torch.float32 keeps no imag"):
        FieldDataset(tmp_path / "x.h5", ["complex"])[0]
    whole = FieldDataset(tmp_path / "x.h5", ["complex"], dtype=torch.complex64)[0]["complex"]
    assert whole.imag.eq(2).all()


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_numbers_of_the_other_byte_order(tmp_path, suffix):
    values = field(0, (2, 1, 8, 8))
    write_fields(tmp_path / f"x{suffix}", 2, [{"x": values.astype(">f4")}])
    dataset = FieldDataset(tmp_path / f"x{suffix}", ["x"])
    assert dataset[1]["x"].equal(torch.from_numpy(values[1]))


@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_parts_without_rows(name, tmp_path):
    """As ranks have that are more than the rows of a dim, or than the channels."""
    write_fields(tmp_path / name, 2, [{"plane": np.ones((2, 5, 4)), "x": np.ones((2, 3, 5, 4))}])
    file = FieldFile(tmp_path / name)
    for array, (_, shape) in file.shapes(["plane", "x"]).items():
        for dim in range(3):
            part = [slice(0, n) for n in shape]
            part[dim] = slice(shape[dim], shape[dim])
            assert file.read(array, 1, part).shape == (*shape[:dim], 0, *shape[dim + 1 :])


def test_arrays_that_are_no_fields(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["words"] = 3.0, np.array([[b"one", b"two"]])
    with pytest.raises(ValueError, match=r"must be .samples, channels, .*; it is a single value"):
        FieldDataset(tmp_path / "x.h5", ["x"])
    with pytest.raises(ValueError, match=r"holds values of \|S3, which are no numbers"):
        FieldDataset(tmp_path / "x.h5", ["words"])[0]


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_a_file_that_was_there_stays_until_another_is_whole(tmp_path, suffix):
    path, x = tmp_path / f"x{suffix}", np.ones((2, 1, 8, 8), "f4")
    index = (slice(0, 1), slice(0, 8), slice(0, 8))
    write_fields(path, 2, [{"x": x}])
    with pytest.raises(ValueError, match="2 of 3 samples"):
        write_fields(path, 3, [{"x": 2 * x}])
    assert (FieldFile(path).read("x", 1, index) == 1).all()
    write_fields(path, 2, [{"x": 3 * x}])
    assert (FieldFile(path).read("x", 1, index) == 3).all()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
