"""TIFF files are read a part at a time, whatever their dims and their layout in the file."""

import pickle

import numpy as np
import pytest
import tifffile
import torch

from lightning_shard import ImageFile, VolumeDataset

numbers = np.random.default_rng(0)
RGB = numbers.integers(0, 255, (70, 50, 3)).astype("uint8")
STACK = numbers.standard_normal((4, 6, 70, 50)).astype("float32")
TILES = {"tile": (32, 32), "compression": "zlib"}
CASES = {  # what is written, how, and what is read
    "gray": (STACK[0, 0], {}, STACK[:1, 0]),
    "rgb": (RGB, {"photometric": "rgb"}, RGB.transpose(2, 0, 1)),
    "tiles": (RGB, {"photometric": "rgb", **TILES}, RGB.transpose(2, 0, 1)),
    "planes": (
        RGB.transpose(2, 0, 1),
        {"photometric": "rgb", "planarconfig": "separate"},
        RGB.transpose(2, 0, 1),
    ),
    "CZYX": (STACK, {"metadata": {"axes": "CZYX"}, **TILES}, STACK),
    "ZCYX": (STACK, {"metadata": {"axes": "ZCYX"}}, STACK.transpose(1, 0, 2, 3)),
    "TCYX": (STACK, {"metadata": {"axes": "TCYX"}}, STACK.reshape(24, 70, 50)),
}


@pytest.mark.parametrize("end", [".tif", ".ome.tif"])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_the_whole(case, end, tmp_path):
    values, options, wanted = CASES[case]
    tifffile.imwrite(tmp_path / f"x{end}", values, **options)
    file = pickle.loads(pickle.dumps(ImageFile(tmp_path / f"x{end}")))
    assert (file.shape, file.dtype) == (wanted.shape, wanted.dtype)
    index = tuple(slice(n // 3, max(n // 3 + 1, 2 * n // 3)) for n in wanted.shape)
    np.testing.assert_array_equal(file.read(index), wanted[index])


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 1, 4)])
def test_a_part_without_rows(shape, tmp_path):
    """Of a picture with fewer rows than tiles some tiles have none."""
    options = {"photometric": "minisblack", "metadata": {"axes": "CZYX"[-len(shape) :]}}
    tifffile.imwrite(tmp_path / "x.tif", np.ones(shape, "float32"), **options)
    file = ImageFile(tmp_path / "x.tif")
    index = [*(slice(0, n) for n in file.shape[:-2]), slice(1, 1), slice(0, shape[-1])]
    assert file.read(index).shape == (*file.shape[:-2], 0, shape[-1])


def test_only_the_tiles_of_a_part_are_decoded(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "x.tif", STACK[0, 0], **TILES)
    file, read = ImageFile(tmp_path / "x.tif"), []
    seek = tifffile.FileHandle.seek
    monkeypatch.setattr(
        tifffile.FileHandle,
        "seek",
        lambda self, at, *rest: (read.append(at), seek(self, at, *rest)),
    )
    file.read((slice(0, 1), slice(0, 30), slice(0, 30)))
    assert len({*read}) == 1  # of 3 x 2


def test_a_level_of_a_pyramid(tmp_path):
    with tifffile.TiffWriter(tmp_path / "x.ome.tif") as file:
        file.write(STACK[0, 0], subifds=1, **TILES)
        file.write(STACK[0, 0, ::2, ::2], subfiletype=1, **TILES)
    found = ImageFile(tmp_path / "x.ome.tif", level=1)
    np.testing.assert_array_equal(
        found.read([slice(0, n) for n in found.shape])[0], STACK[0, 0, ::2, ::2]
    )
    with pytest.raises(ValueError, match="it has 2 levels, and no level 2"):
        ImageFile(tmp_path / "x.ome.tif", level=2)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ImageFile(tmp_path / "x.tif")
    (tmp_path / "x.tif").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"x\.tif is not a whole TIFF file"):
        ImageFile(tmp_path / "x.tif")
    tifffile.imwrite(tmp_path / "y.tif", RGB, photometric="rgb", **TILES)
    whole = (tmp_path / "y.tif").read_bytes()
    (tmp_path / "y.tif").write_bytes(whole[: len(whole) // 2])
    file = ImageFile(tmp_path / "y.tif")
    with pytest.raises(ValueError, match=r"y\.tif cannot be read"):
        file.read([slice(0, n) for n in file.shape])


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", "<>")
def test_a_file_that_has_lost_pages_is_refused(big, order, tmp_path):
    path = tmp_path / "x.tif"
    tifffile.imwrite(
        path, STACK[0], bigtiff=big, byteorder=order, compression="zlib", metadata=None
    )
    assert ImageFile(path).shape == (6, 70, 50)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"x\.tif is not a whole .* \(pages from 3 on are missing"):
        ImageFile(path)


def test_a_dataset_of_pictures_and_labels(tmp_path):
    for folder, values in {"images": RGB, "labels": RGB[..., 0]}.items():
        (tmp_path / folder).mkdir()
        tifffile.imwrite(tmp_path / folder / "0.tif", values, **TILES)
    dataset = VolumeDataset({"image": tmp_path / "images", "label": tmp_path / "labels"})
    assert dataset[0]["image"].shape == (3, 70, 50)
    assert torch.equal(dataset[0]["label"][0], torch.from_numpy(RGB[..., 0]).long())
