"""Volumes that are made up or read from files: each rank has its part of each volume."""

import nibabel
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import lightning_shard
from lightning_modules import SegmentationDataModule
from lightning_modules.segmentation.phantoms import LESION, Phantoms
from lightning_shard.data.split import shard_batch
from tests.data.readers.test_fields import split_by
from tests.parity import mesh_of

WHOLE = (slice(None),) * 3


def ready(trainer=None, stage="fit", **options):
    made = SegmentationDataModule(**{"num_val": 1, "num_test": 1} | options)
    made.trainer = trainer
    made.setup(stage)
    return made


def test_a_part_is_that_of_the_whole_volume():
    phantoms, part = Phantoms((15, 12, 11), vary=3), (slice(4, 9), slice(3, 10), slice(2, 11))
    for make in (phantoms.image, phantoms.label):
        assert make(1, part).equal(make(1, WHOLE)[part])
    assert phantoms.image(1, (slice(5, 5), *WHOLE[1:])).shape == (0, *phantoms.shape(1)[1:])


def test_volumes_differ_and_do_not_depend_on_their_number():
    phantoms = Phantoms(vary=4)
    assert len({phantoms.shape(i) for i in range(6)}) > 3
    assert not Phantoms().image(0, WHOLE).equal(Phantoms().image(1, WHOLE))
    assert Phantoms().image(3, WHOLE).equal(Phantoms().image(3, WHOLE))


def test_brightness_alone_does_not_tell_the_class():
    """Vessels are as bright as lesions, which some volumes lack."""
    phantoms = Phantoms(noise=0.0)
    labels = [phantoms.label(i, WHOLE) for i in range(8)]
    assert {bool((label == LESION).any()) for label in labels} == {True, False}
    image, label = phantoms.image(2, WHOLE), labels[2]
    assert image[label == 0].max() > image[label == LESION].min()


@pytest.mark.spmd(2)
@pytest.mark.parametrize("dims", [None, {"image": 2, "label": 2}])
def test_each_rank_makes_its_part(dims):
    options = {"extents": (7, 6, 5), "vary": 2, "num_train": 2}
    found, whole = (ready(trainer, **options) for trainer in (split_by(dims), None))
    part, sample = (each.datasets["val"][0] for each in (found, whole))
    assert part["image"].tensor.shape[1] < sample["image"].shape[1]
    batch = shard_batch(default_collate([part]), mesh_of(2), dims)
    for key, value in sample.items():
        assert part[key].tensor.shape == part["image"].tensor.shape
        assert lightning_shard.gather(batch[key])[0].equal(value), key


def test_volumes_are_made_once():
    dataset = ready(extents=(7, 6, 5), num_train=2).datasets["train"]
    assert dataset[0]["image"] is dataset[0]["image"]


def write(folder, values):
    folder.mkdir()
    for i, each in enumerate(values):
        nibabel.save(nibabel.Nifti1Image(each, np.eye(4)), folder / f"{i}.nii.gz")
    return str(folder)


def test_files(tmp_path):
    random = np.random.default_rng(0)
    images = write(tmp_path / "images", random.standard_normal((5, 4, 3, 6)).astype("f4"))
    labels = write(tmp_path / "labels", random.integers(0, 3, (5, 4, 3, 6)).astype("u1"))
    made = ready(images=images, labels=labels)
    sizes = {name: len(each) for name, each in made.datasets.items()}
    assert sizes == {"train": 3, "val": 1, "test": 1}
    assert made.datasets["test"][0]["label"].shape == (1, 4, 3, 6)
    alone = ready(stage="predict", images=images)
    assert len(alone.predict_dataloader()) == 5
    with pytest.raises(ValueError, match="fit needs labels beside the images"):
        ready(images=images)
    with pytest.raises(ValueError, match="has 5 volumes, too few for 4 of training, 1 of"):
        ready(images=images, labels=labels, num_train=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": "labelsTr"}, "labels labelsTr need images"),
        ({"extents": (8, 8, 4), "vary": 4}, "vary must be less than each of the extents"),
        ({"num_val": -1}, "num_val must be 0 or more; got -1"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        SegmentationDataModule(**options)


def test_a_batch_of_several_grids():
    made = ready(vary=6, batch_size=2, num_train=4)
    with pytest.raises(ValueError, match=r"must have one grid; got .* Use batch_size: 1"):
        list(made.train_dataloader())


def test_parts_pass_through_a_loader():
    batch = next(iter(ready(extents=(7, 6, 5), num_train=2, batch_size=2).train_dataloader()))
    assert batch["image"].shape == batch["label"].shape == (2, 1, 7, 6, 5)
    assert batch["label"].dtype == torch.int64
