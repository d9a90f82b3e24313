"""Volumes in NIfTI files: each rank reads its part of each volume."""

import contextlib

import nibabel
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import lightning_shard
from lightning_shard import VolumeDataset, VolumeFile
from lightning_shard.data.split import shard_batch
from tests import training
from tests.data.readers.test_fields import split_by
from tests.parity import mesh_of

EXTENTS = (7, 6, 4)
RANDOM = np.random.default_rng(0)
IMAGES = [RANDOM.integers(0, 100, EXTENTS).astype("i2") for _ in range(2)]
LABELS = [RANDOM.integers(0, 3, EXTENTS).astype("u1") for _ in range(2)]


def save(path, values, slope=1.0, intercept=0.0):
    path.parent.mkdir(exist_ok=True)
    image = nibabel.Nifti1Image(values, np.eye(4))
    image.header.set_slope_inter(slope, intercept)
    nibabel.save(image, path)


def folders(suffix):
    folder = training.shared_path("volumes")
    if dist.get_rank() == 0:
        folder.mkdir()
        for i in range(2):
            save(folder / f"images/{i}{suffix}", IMAGES[i], slope=0.5, intercept=-3.0)
            save(folder / f"labels/{i}{suffix}", LABELS[i])
    dist.barrier()
    return {"image": folder / "images", "label": folder / "labels"}


@pytest.mark.spmd(2)
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    ("dims", "dim"), [(None, 2), (-1, 4), ({"image": [2], "label": [2]}, 2)], ids=str
)
def test_parts_are_those_of_the_whole_volumes(suffix, dims, dim):
    files = folders(suffix)
    dataset, whole = VolumeDataset(files, split_by(dims)), VolumeDataset(files)
    for i in range(2):
        part = {key: entry.tensor.shape[dim - 1] for key, entry in dataset[i].items()}
        half = -(-(EXTENTS[dim - 2] - dist.get_rank()) // 2)
        assert part == {"image": half, "label": half}
        batch = shard_batch(default_collate([dataset[i]]), mesh_of(2), dims)
        wanted = {"image": 0.5 * IMAGES[i].astype("f4") - 3, "label": LABELS[i].astype("i8")}
        for key, value in wanted.items():
            found = lightning_shard.gather(batch[key])
            assert found.equal(torch.from_numpy(value)[None, None])
            assert whole[i][key].equal(found[0])


@pytest.mark.spmd(2)
def test_labels_alone_are_whole():
    dataset = VolumeDataset({"label": folders(".nii")["label"]}, split_by(None))
    assert dataset[0]["label"].shape == (1, *EXTENTS)


@pytest.mark.spmd(2)
def test_the_fourth_dim_holds_channels():
    path = training.shared_path("channels.nii")
    values = np.stack([IMAGES[0], IMAGES[1]], -1)
    if dist.get_rank() == 0:
        save(path, values)
    dist.barrier()
    dataset = VolumeDataset({"image": [path]}, split_by(None))
    batch = shard_batch(default_collate([dataset[0]]), mesh_of(2), None)
    wanted = torch.from_numpy(np.stack(IMAGES)).float()
    assert lightning_shard.gather(batch["image"])[0].equal(wanted)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("channels", [1, 9])
def test_parts_without_rows(suffix, channels, tmp_path):
    """As ranks have that are more than the rows of a dim, or than the channels."""
    values = np.stack([IMAGES[0]] * channels, -1)
    save(tmp_path / f"a{suffix}", values[..., 0] if channels == 1 else values)
    file = VolumeFile(tmp_path / f"a{suffix}")
    whole = [slice(0, n) for n in (channels, *EXTENTS)]
    for dim, extent in enumerate((channels, *EXTENTS)):
        for start in (0, extent):
            part = [*whole[:dim], slice(start, start), *whole[dim + 1 :]]
            wanted = (*file.shape[:dim], 0, *file.shape[dim + 1 :])
            assert file.read(part).shape == wanted


def test_mistakes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a.nii does not exist"):
        VolumeDataset({"image": tmp_path / "a.nii"})
    with pytest.raises(FileNotFoundError, match=r"has no file that ends in \.nii, \.nii\.gz"):
        VolumeDataset({"image": tmp_path})
    (tmp_path / "a.nii").write_bytes(b"no volume")
    with pytest.raises(ValueError, match=r"a.nii is not a whole NIfTI file"):
        VolumeDataset({"image": tmp_path / "a.nii"})
    save(tmp_path / "b.nii", IMAGES[0])
    save(tmp_path / "c.nii", LABELS[0][:5])
    save(tmp_path / "d.nii", IMAGES[0][0])
    with pytest.raises(ValueError, match=r"one grid; got .*b.nii \(7, 6, 4\) and .*c.nii \(5"):
        VolumeDataset({"image": [tmp_path / "b.nii"], "label": [tmp_path / "c.nii"]})
    with pytest.raises(ValueError, match=r"d.nii must have 3 dims, or 4 with channels; got \(6, 4"):
        VolumeDataset({"image": [tmp_path / "d.nii"]})
    with pytest.raises(ValueError, match=r"as many files as the others; got {'image': 2, "):
        VolumeDataset({"image": [tmp_path / "b.nii"] * 2, "label": [tmp_path / "b.nii"]})
    save(tmp_path / "e.nii", IMAGES[0], slope=0.5)
    with pytest.raises(ValueError, match=r"e.nii must hold whole numbers, as a file of labels"):
        VolumeDataset({"label": [tmp_path / "e.nii"]})[0]
    with pytest.raises(TypeError, match=r"files must map each key of a sample .* got \['b.nii'\]"):
        VolumeDataset(["b.nii"])
    with pytest.raises(ValueError, match=r"labels names 'msk', but files has \['image', 'mask'\]"):
        VolumeDataset({"image": tmp_path / "b.nii", "mask": tmp_path / "b.nii"}, labels=["msk"])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_files_that_are_cut(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    save(path, IMAGES[0])
    dataset = VolumeDataset({"image": path})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"a{suffix} (is damaged|is not a whole)"):
        dataset[0]


def test_values_that_are_no_labels_or_no_numbers(tmp_path):
    save(tmp_path / "endless.nii", np.full(EXTENTS, np.inf, "f4"))
    with pytest.raises(ValueError, match=r"endless.nii must hold whole numbers"):
        VolumeDataset({"label": tmp_path / "endless.nii"})[0]
    colors = np.zeros(EXTENTS, [("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(nibabel.Nifti1Image(colors, np.eye(4)), tmp_path / "colors.nii")
    with pytest.raises(ValueError, match=r"colors.nii holds colors of .* write them as channels"):
        VolumeDataset({"image": tmp_path / "colors.nii"})[0]
    channels = np.stack([colors[name] for name in "RGB"], -1)
    nibabel.save(nibabel.Nifti1Image(channels, np.eye(4)), tmp_path / "channels.nii")
    assert VolumeDataset({"image": tmp_path / "channels.nii"})[0]["image"].shape == (3, *EXTENTS)


def test_folders_are_matched_by_case(tmp_path):
    numbers = (1, 2, 10)  # whose names sort otherwise than those of the labels
    for number in numbers:
        values = np.full(EXTENTS, number, "i2")
        save(tmp_path / f"imagesTr/liver_{number}_0000.nii.gz", values)
        save(tmp_path / f"labelsTr/liver_{number}.nii.gz", values)
    files = {"image": tmp_path / "imagesTr", "label": tmp_path / "labelsTr"}
    dataset = VolumeDataset(files)
    found = [(float(entry["image"].max()), int(entry["label"].max())) for entry in dataset]
    assert found == [(n, n) for n in numbers]
    (tmp_path / "imagesTr/liver_1_0000.nii.gz").unlink()
    (tmp_path / "labelsTr/liver_10.nii.gz").unlink()
    with pytest.raises(ValueError, match=r"liver_2_0000.nii.gz would be matched with liver_1.nii"):
        VolumeDataset(files)
    lists = {key: sorted(path.iterdir()) for key, path in files.items()}
    assert len(VolumeDataset(lists)) == 2  # lists are taken as they are


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (["img_1", "img_2", "img_10"], ["seg_1", "seg_2", "seg_10"], None),
        (["a_t1", "b_t1"], ["a_seg", "b_seg"], None),
        (["sub-01_T1w", "sub-02_T1w"], ["sub-01_seg", "sub-02_seg"], None),
        (["img_1", "img_2", "img_3"], ["seg_1", "seg_2", "seg_4"], "img_3.nii .* with seg_4.nii"),
        (["b_1", "a_2"], ["1", "2"], "a_2.nii would be matched with 1.nii"),
    ],
)
def test_folders_are_matched_by_numbers(images, labels, words, tmp_path):
    files = {"image": tmp_path / "images", "label": tmp_path / "labels"}
    for folder, names in zip(files.values(), (images, labels), strict=True):
        for name in names:
            save(folder / f"{name}.nii", LABELS[0])
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        found = VolumeDataset(files).files
        assert [path.stem for path in found["image"]] == images
        assert [path.stem for path in found["label"]] == labels


def test_what_is_no_file_of_its_own(tmp_path):
    save(tmp_path / "images/a.img", LABELS[0])  # a pair of .hdr and .img
    save(tmp_path / "images/b.NII", LABELS[1])
    (tmp_path / "images/._b.NII").write_bytes(b"of an archive of macOS")
    dataset = VolumeDataset({"image": tmp_path / "images"})
    assert [
        entry["image"].equal(torch.from_numpy(x)[None].float())
        for entry, x in zip(dataset, LABELS, strict=True)
    ] == [True, True]


@pytest.mark.filterwarnings("error")
def test_volumes_that_lie_apart(tmp_path):
    files = {"image": tmp_path / "image.nii", "label": tmp_path / "label.nii"}
    save(files["image"], IMAGES[0])
    for affine in (np.diag([1, 1, 1.01, 1]), np.diag([1, 1, 2, 1]), np.eye(4) + 3 * np.eye(4, k=3)):
        nibabel.save(nibabel.Nifti1Image(LABELS[0], affine), files["label"])
        if affine[2, 2] == 1.01:
            VolumeDataset(files)
        else:
            with pytest.warns(UserWarning, match=r"In 1 of 1 samples .* \(first: .*label.nii\)"):
                VolumeDataset(files)


def test_volumes_that_are_turned(tmp_path):
    save(tmp_path / "image.nii", IMAGES[0])
    affine = np.diag([-1.0, 1, 1, 1])
    affine[0, 3] = EXTENTS[0] - 1
    turned = nibabel.Nifti1Image(LABELS[0], affine)
    nibabel.save(turned, tmp_path / "label.nii")
    files = {"image": tmp_path / "image.nii", "label": tmp_path / "label.nii"}
    with pytest.raises(ValueError, match=r"one orientation; got .*image.nii RAS and .*nii LAS"):
        VolumeDataset(files)
    nibabel.save(nibabel.as_closest_canonical(turned), files["label"])
    assert VolumeDataset(files)[0]["label"].equal(
        torch.from_numpy(LABELS[0][None, ::-1].copy()).long()
    )
