"""Files of Darcy samples: generating them once, and reading ours or anybody's.

The invariant: a file under its final name is complete. It is written under another name and moved
there in one step, and its name holds a hash of everything that determines its content.

Shapes: S samples of H = W nodes a side; files hold x (coefficient) and y (pressure): `.pt` files
(S, H, W), HDF5 and Zarr (S, 1, H, W).
"""

import dataclasses
import errno
import hashlib
import json
import pickle
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from tqdm import tqdm

from lightning_modules.darcy.solver import ConvergenceError, binary_coefficient, solve_darcy
from lightning_modules.shared.cached import is_intact
from lightning_shard import FieldFile, write_fields

Part = Literal["train", "test"]

CHUNK = 32  # samples solved together; the result does not depend on it


@dataclass(frozen=True)
class DarcyRecipe:
    """Holds everything that determines the content of one generated file.

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

    def path(self, root: Path, suffix: str = ".pt") -> Path:
        """Return the file of this recipe in the cache folder `root`."""
        key = json.dumps(dataclasses.asdict(self), sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        return root / f"darcy_{self.part}_{self.resolution}_{digest}{suffix}"

    @property
    def nbytes(self) -> int:
        """The bytes of all samples."""
        return 2 * 4 * self.num_samples * self.resolution**2

    def generate(self) -> Iterator[dict[str, np.ndarray]]:
        """Draw the coefficients and solve, some samples at a time: x and y, (S, 1, H, W)."""
        rng = np.random.default_rng([self.seed, self.part == "test", self.resolution])
        with tqdm(total=self.num_samples, desc="solving Darcy flow", unit=" samples") as progress:
            for start in range(0, self.num_samples, CHUNK):
                count = min(CHUNK, self.num_samples - start)
                a = binary_coefficient(count, self.resolution, rng, low=self.low, high=self.high)
                u = solve_darcy(a, tolerance=self.tolerance)
                yield {"x": a[:, None].astype(np.float32), "y": u[:, None].astype(np.float32)}
                progress.update(count)


def ensure_cached(recipe: DarcyRecipe, root: Path, suffix: str = ".pt") -> None:
    """Generate the file of `recipe` in `root`, unless an intact one is there.

    Args:
        recipe: The file to generate.
        root: Folder of the cache; made if missing.
        suffix: The end of the file's name, which says its format: .pt, .h5 or .zarr.

    Raises:
        OSError: If the file cannot be written; nothing of it is left then.
    """
    path = recipe.path(root, suffix)
    if path.exists():
        if _is_intact(path, recipe):
            return
        rank_zero_warn(f"{path} is damaged; generating it again.")
        _remove(path)
    rank_zero_info(
        f"Generating {recipe.num_samples} {recipe.part} samples of Darcy flow at "
        f"{recipe.resolution} x {recipe.resolution} nodes, once: {path}"
    )
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}.partial{suffix}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(root).free < recipe.nbytes:  # known before hours of solving
            raise OSError(errno.ENOSPC, "No space left on device")
        _write(recipe, partial)
        try:
            partial.rename(path)
        except OSError:
            if not path.is_dir():  # else another process has generated the same folder meanwhile
                raise
    except (OSError, RuntimeError) as error:  # HDF5 and torch raise both
        if isinstance(error, ConvergenceError):
            raise
        raise OSError(
            f"{recipe.num_samples} samples of Darcy flow at {recipe.resolution} x "
            f"{recipe.resolution} nodes, {recipe.nbytes / 2**20:,.1f} MiB, cannot be written to "
            f"{root} ({error}); free space there, or choose another folder with `root`."
        ) from error
    finally:
        _remove(partial)


def _write(recipe: DarcyRecipe, path: Path) -> None:
    if path.suffix != ".pt":
        write_fields(path, recipe.num_samples, recipe.generate())
        return
    blocks = list(recipe.generate())
    samples = {k: torch.from_numpy(np.concatenate([b[k][:, 0] for b in blocks])) for k in "xy"}
    with path.open("wb") as file:
        torch.save(samples, file)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _is_intact(path: Path, recipe: DarcyRecipe) -> bool:
    """Return True if all of a file is there, and fits its checksums."""
    if path.suffix == ".pt":
        return is_intact(path)
    try:
        blocks = FieldFile(path).blocks("xy", recipe.num_samples, CHUNK)
        return sum(len(block["x"]) for block in blocks) == recipe.num_samples
    except (OSError, ValueError, KeyError):
        return False


def find_samples(source: Path, part: Part, resolution: int) -> Path:
    """Find the file of `source` that holds one part at one resolution.

    Args:
        source: An HDF5 file or a Zarr group, or a folder with files `darcy_{part}_{resolution}`
            that end in `.pt`, `.h5` or `.zarr`.
        part: "train" or "test".
        resolution: Nodes a side.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If there is none; the message names the resolutions that are there.
        ValueError: If one file is to hold all, and has no groups.
    """
    if source.suffix in FieldFile.SUFFIXES:
        if not source.exists():
            raise FileNotFoundError(
                f"the Darcy samples {source} do not exist; correct `source`, or leave it out to "
                "generate samples."
            )
        if not _groups(source) and {"x", "y"} <= {*FieldFile(source).arrays}:
            raise ValueError(
                f"{source} has no groups such as train_{resolution} and test_{resolution}, so the "
                "samples for test would be those of training; put its arrays into such groups, or "
                f"name a folder with a file darcy_train_{resolution}{source.suffix} and one for "
                "test."
            )
        return source
    files = [
        path
        for path in source.glob(f"darcy_{part}_*")
        if path.suffix in (".pt", *FieldFile.SUFFIXES)
    ]
    stem = f"darcy_{part}_{resolution}"
    for path in sorted(files):
        if path.stem == stem:
            return path
    found = sorted({path.stem.removeprefix(f"darcy_{part}_") for path in files})
    raise FileNotFoundError(
        f"The {part} samples at resolution {resolution} need the file {source / stem}.pt, .h5 or "
        f".zarr, which does not exist; of {part} samples the folder has "
        f"{', '.join(found) or 'none'}. Put it there, ask for another "
        "resolution, or leave out `source` to generate samples."
    )


def read_samples(path: Path, part: Part, resolution: int, count: int) -> tuple[Tensor, Tensor]:
    """Read the first samples of a `.pt` file, which is a dict of x and y.

    Args:
        path: The file.
        part: "train" or "test".
        resolution: Nodes a side the samples must have.
        count: Number S of samples.

    Returns:
        Coefficient and pressure, float32, (S, 1, H, W) each.

    Raises:
        ValueError: If the file is damaged, or holds fewer samples, or another resolution.
    """
    try:
        # files of torch before 1.6 are no archives, and cannot be mapped into memory
        stored = torch.load(path, weights_only=True, mmap=zipfile.is_zipfile(path))
        x, y = stored["x"][:count], stored["y"][:count]
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, LookupError, TypeError) as err:
        raise ValueError(
            f"{path} is not a whole file of a dict of tensors x and y, as torch.save writes it; "
            "restore it, or leave out `source` to generate samples."
        ) from err
    x, y = (t.float().reshape(len(t), 1, *t.shape[-2:]) for t in (x, y))
    check_shapes(path, part, resolution, count, {"x": tuple(x.shape), "y": tuple(y.shape)})
    return x, y


def _groups(path: Path) -> list[str]:
    """Return the names of the groups that a file has for parts and resolutions."""
    return sorted(n for n in FieldFile(path).arrays if n.startswith(("train_", "test_")))


def field_group(path: Path, part: Part, resolution: int, count: int) -> str:
    """Find the group of a file with one part at one resolution; "" for a file without groups.

    Raises:
        FileNotFoundError: If its groups are of other resolutions.
        ValueError: If it holds fewer samples, other arrays, or another resolution.
    """
    wanted = f"{part}_{resolution}"
    found = _groups(path)
    if found and wanted not in found:
        raise FileNotFoundError(
            f"{path} has no group {wanted}, which the {part} samples at resolution {resolution} "
            f"need; it has {', '.join(found)}. Ask for one of these resolutions."
        )
    shapes = FieldFile(path, wanted).shapes(("x", "y"))
    stored = {name: (min(n, count), *shape) for name, (n, shape) in shapes.items()}
    check_shapes(path, part, resolution, count, stored)
    return wanted if found else ""


def check_shapes(
    path: Path, part: Part, resolution: int, count: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Refuse fewer samples or another resolution than wanted."""
    if set(shapes.values()) != {(count, 1, resolution, resolution)}:
        raise ValueError(
            f"The {part} set needs {count} samples of {resolution} x {resolution} nodes; {path} "
            f"has x {shapes['x']} and y {shapes['y']}. Lower the number of samples, or change the "
            "resolution."
        )
