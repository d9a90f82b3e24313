"""Files of Darcy samples: generating them once, and reading ours or anybody's.

The invariant: a file under its final name is complete. It is written under another name and moved
there in one step, and its name holds a hash of everything that determines its content.

Shapes: S samples of H = W nodes a side; files hold x (coefficient) and y (pressure), (S, H, W).
"""

import dataclasses
import hashlib
import json
import uuid
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from tqdm import tqdm

from lightning_modules.darcy_solver import binary_coefficient, solve_darcy

Part = Literal["train", "test"]

CHUNK = 32  # samples solved together; the result does not depend on it


@dataclass(frozen=True)
class DarcyRecipe:
    """Everything that determines the content of one generated file.

    Attributes:
        part: "train" or "test"; the two never share random numbers.
        resolution: Nodes a side.
        num_samples: Samples in the file.
        seed: Seed of the random fields.
        low: Permeability of one phase.
        high: Permeability of the other phase.
        tolerance: Relative residual at which the solver stops.
        version: Raised whenever the solver or the layout of the file changes.
    """

    part: Part
    resolution: int
    num_samples: int
    seed: int = 0
    low: float = 3.0
    high: float = 12.0
    tolerance: float = 1e-8
    version: int = 1

    def path(self, root: Path) -> Path:
        """File of this recipe in the cache folder `root`."""
        key = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        return root / f"darcy_{self.part}_{self.resolution}_{digest}.pt"

    def generate(self) -> dict[str, Tensor]:
        """Draw the coefficients and solve: {"x": (S, H, W), "y": (S, H, W)}, float32."""
        rng = np.random.default_rng([self.seed, self.part == "test", self.resolution])
        shape = (self.num_samples, self.resolution, self.resolution)
        samples = {"x": torch.empty(shape), "y": torch.empty(shape)}
        with tqdm(total=self.num_samples, desc="solving Darcy flow", unit=" samples") as progress:
            for chunk in torch.arange(self.num_samples).split(CHUNK):
                a = binary_coefficient(
                    len(chunk), self.resolution, rng, low=self.low, high=self.high
                )
                samples["x"][chunk] = torch.from_numpy(a).float()
                u = solve_darcy(a, tolerance=self.tolerance)
                samples["y"][chunk] = torch.from_numpy(u).float()
                progress.update(len(chunk))
        return samples


def ensure_cached(recipe: DarcyRecipe, root: Path) -> None:
    """Generate the file of `recipe` in `root`, unless an intact one is there.

    Args:
        recipe: What to generate.
        root: Folder of the cache; made if missing.
    """
    path = recipe.path(root)
    if path.exists():
        if _is_intact(path):
            return
        rank_zero_warn(f"{path} is damaged; generating it again.")
    rank_zero_info(
        f"Generating {recipe.num_samples} {recipe.part} samples of Darcy flow at "
        f"{recipe.resolution} x {recipe.resolution} nodes, once: {path}"
    )
    root.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}.partial")
    try:
        torch.save(recipe.generate(), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_intact(path: Path) -> bool:
    """Whether a `.pt` file, which is a zip archive, is whole and fits its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError):
        return False


def find_samples(source: Path, part: Part, resolution: int) -> Path:
    """File of `source` that holds one part at one resolution.

    Args:
        source: An HDF5 file, or a folder with files `darcy_{part}_{resolution}.pt` or `.h5`.
        part: "train" or "test".
        resolution: Nodes a side.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there is none.
    """
    candidates = [source / f"darcy_{part}_{resolution}{suffix}" for suffix in (".pt", ".h5")]
    if source.suffix in (".h5", ".hdf5"):
        candidates = [source]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"The {part} samples at resolution {resolution} need the file "
        f"{' or '.join(str(path) for path in candidates)}, which does not exist. "
        "Put it there, or leave out `source` to generate samples."
    )


def read_samples(path: Path, part: Part, resolution: int, count: int) -> tuple[Tensor, Tensor]:
    """Read the first samples of a file.

    Args:
        path: A `.pt` file with a dict of x and y, or an HDF5 file with datasets x and y, at its
            root or in a group `{part}_{resolution}`.
        part: "train" or "test".
        resolution: Nodes a side the samples must have.
        count: Number S of samples.

    Returns:
        Coefficient and pressure, float32, (S, 1, H, W) each.

    Raises:
        ValueError: If the file holds fewer samples, or another resolution.
    """
    if path.suffix == ".pt":
        stored = torch.load(path, weights_only=True, mmap=True)
        x, y = stored["x"][:count], stored["y"][:count]
    else:
        x, y = _read_hdf5(path, f"{part}_{resolution}", count)
    x, y = (t.float().reshape(len(t), 1, *t.shape[-2:]) for t in (x, y))
    wanted = (count, 1, resolution, resolution)
    if x.shape != wanted or y.shape != wanted:
        raise ValueError(
            f"The {part} set needs {count} samples of {resolution} x {resolution} nodes; {path} "
            f"has x {tuple(x.shape)} and y {tuple(y.shape)}. Lower the number of samples, or "
            "change the resolution."
        )
    return x, y


def _read_hdf5(path: Path, group: str, count: int) -> tuple[Tensor, Tensor]:
    with h5py.File(path) as file:
        prefix = f"{group}/" if group in file else ""
        if f"{prefix}x" not in file or f"{prefix}y" not in file:
            raise ValueError(
                f"{path} needs datasets x and y, at its root or in a group {group}; got "
                f"{sorted(file)}. Rename them, or point `source` elsewhere."
            )
        x, y = (np.asarray(file[prefix + name][:count]) for name in ("x", "y"))  # pyright: ignore[reportIndexIssue]  # h5py types a path as group or dataset
    return torch.from_numpy(x), torch.from_numpy(y)
