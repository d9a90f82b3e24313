"""Computes the statistics of the Darcy training set that a model may use.

A file that is too large for memory is read once, and its statistics are kept in the cache folder.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_modules.shared.cached import is_intact, write_whole
from lightning_shard import FieldFile

CHUNK = 32  # samples in memory at once


@dataclass(frozen=True)
class DarcyStats:
    """Holds statistics of the training set.

    Attributes:
        x_mean: Mean of the coefficient over samples and nodes.
        x_std: Standard deviation of the coefficient.
        y_mean: Mean of the pressure.
        y_std: Standard deviation of the pressure.
        mean_solution: Mean pressure at each node of the training resolution, (1, H, W).
    """

    x_mean: float
    x_std: float
    y_mean: float
    y_std: float
    mean_solution: Tensor


def stats_of(x: Tensor, y: Tensor) -> DarcyStats:
    """Compute the statistics of samples in memory, (S, 1, H, W) each."""
    return DarcyStats(
        x_mean=x.mean().item(),
        x_std=x.std().item(),
        y_mean=y.mean().item(),
        y_std=y.std().item(),
        mean_solution=y.mean(dim=0),
    )


def ensure_stats(path: Path, group: str, count: int, root: Path) -> None:
    """Go once through the first `count` samples of a file, unless that was done before.

    Raises:
        OSError: What was found cannot be written to `root`; nothing of it is left then.
    """
    kept = _kept(path, group, count, root)
    if kept.exists():
        if is_intact(kept):
            return
        rank_zero_warn(f"{kept} is damaged; going through {path} again.")
    content = io.BytesIO()
    torch.save(asdict(_stats_of_file(path, group, count)), content)
    write_whole(kept, content.getvalue())


def read_stats(path: Path, group: str, count: int, root: Path) -> DarcyStats:
    """Read the statistics that `ensure_stats` has kept."""
    return DarcyStats(**torch.load(_kept(path, group, count, root), weights_only=True))


def _kept(path: Path, group: str, count: int, root: Path) -> Path:
    written = (path / "zarr.json" if path.is_dir() else path).stat()
    key = [str(path.resolve()), written.st_mtime_ns, written.st_size, group, count]
    return root / f"stats_{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.pt"


def _stats_of_file(path: Path, group: str, count: int) -> DarcyStats:
    sums = {"x": np.zeros(3), "y": np.zeros(3)}  # sums of values and of squares, and their number
    total = np.zeros(())
    for block in FieldFile(path, group).blocks(("x", "y"), count, CHUNK):
        for name, values in block.items():
            wide = values.astype(np.float64)
            sums[name] += wide.sum(), np.square(wide).sum(), wide.size
        total = total + block["y"].astype(np.float64).sum(axis=0)
    mean = {name: s[0] / s[2] for name, s in sums.items()}
    std = {name: np.sqrt((s[1] - s[0] ** 2 / s[2]) / (s[2] - 1)) for name, s in sums.items()}
    solution = torch.from_numpy(total / count).float()
    return DarcyStats(
        x_mean=float(mean["x"]),
        x_std=float(std["x"]),
        y_mean=float(mean["y"]),
        y_std=float(std["y"]),
        mean_solution=solution.reshape(1, *solution.shape[-2:]),
    )
