"""What a name, a URL or a cache of a stranger can make run: nothing (see test_hostile_files.py)."""

import gzip
import json
import os
import pickle
import zipfile
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from lightning_modules.darcy.files import read_samples
from lightning_modules.darcy.stats import ensure_stats, read_stats
from lightning_modules.shared.cached import cached
from lightning_shard import load_weights
from lightning_shard.trainer.checkpoint_io import CheckpointFiles
from tests.cli.test_hostile_files import (
    CODE,
    GADGETS,
    TOUCH,
    Calls,
    in_a_folder_without_marker,
    refused,
)

__all__ = ["in_a_folder_without_marker"]  # a fixture of every test here

NAMES = {
    "substitution": f"$({TOUCH}).ckpt", "backticks": f"`{TOUCH}`.ckpt", "semicolon": f"; {TOUCH}",
    "pipe": f"| {TOUCH}", "option": "--upload-pack=touch marker",
    "protocol of a module": "evil_module://evil.ckpt", "python": "python://evil_module.Layer",
    "file": "file://{here}/evil.ckpt", "local": "local://{here}/evil.ckpt",
    "cached": "simplecache::file://{here}/evil.ckpt", "memory": "memory://evil.ckpt",
    "archive": "zip://evil.ckpt::file://{here}/evil.zip",
    "listed": "reference://evil.ckpt::file://{here}/evil.json",
    "above": "sub/../evil.ckpt",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_and_urls_of_checkpoints(name, capsys):
    """What stands there calls a program, too, once it is unpickled."""
    Path("evil_module.py").write_text(CODE)
    Path("sub").mkdir()
    torch.save(
        {"state_dict": {"weight": torch.ones(2, 2)}, "a": Calls(os.system, TOUCH)}, "evil.ckpt"
    )
    with zipfile.ZipFile("evil.zip", "w") as archive:
        archive.write("evil.ckpt")
    Path("evil.json").write_text(json.dumps({"evil.ckpt": [str(Path("evil.ckpt").resolve())]}))
    fsspec.filesystem("memory").pipe("/evil.ckpt", Path("evil.ckpt").read_bytes())
    path = NAMES[name].format(here=Path.cwd())
    for read in (
        lambda: CheckpointFiles().load_checkpoint(path),
        lambda: load_weights(nn.Linear(2, 2), path),
    ):
        with pytest.raises((ValueError, OSError, pickle.UnpicklingError, ImportError)):
            read()
    refused(capsys, ["inspect", path])
    refused(capsys, ["export", path, "out.pt"])


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("cache", ["samples", "statistics", "values"])
def test_caches_of_data(cache, gadget):
    Path("evil.py").write_text(CODE)
    Path("hubconf.py").write_text(CODE)
    torch.save({}, "inner.pt")
    evil = GADGETS[gadget]()
    if cache == "samples":
        torch.save({"x": evil, "y": evil}, "darcy_train_8.pt")
        with pytest.raises(ValueError, match="is not a whole file of a dict of tensors"):
            read_samples(Path("darcy_train_8.pt"), "train", 8, 1)
    elif cache == "statistics":
        Path("fields.h5").write_bytes(b"of no matter once there are statistics")
        kept = kept_statistics()
        torch.save({"x_mean": evil}, kept)
        ensure_stats(Path("fields.h5"), "", 1, Path())  # it is whole
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            read_stats(Path("fields.h5"), "", 1, Path())
    else:
        Path("a.json.gz").write_bytes(gzip.compress(pickle.dumps(evil)))
        with pytest.warns(UserWarning, match="is damaged; making it again"):
            assert cached(Path("a.json.gz"), lambda: [1]) == [1]


def kept_statistics() -> Path:
    """Where the statistics of `fields.h5` are kept."""
    with pytest.raises(FileNotFoundError) as caught:
        read_stats(Path("fields.h5"), "", 1, Path())
    return Path(caught.value.filename)
