"""Volumes that are made up: organs with lesions in a body, with noise and an uneven brightness.

Two organs differ in size and place more than in brightness. Lesions lie in the large organ; vessels
outside of it are as bright, and belong to the background. So brightness alone does not tell what a
voxel is. A volume may have no lesion.

Shapes: X x Y x Z voxels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.shared.numbers import at_least

CLASSES = ("background", "large_organ", "small_organ", "lesion")
LARGE, SMALL, LESION = 1, 2, 3
AIR, BODY, ORGANS, BRIGHT = 0.0, 0.6, 1.0, 1.5
MOST_LESIONS, VESSELS = 3, 4


class _Ellipsoid(NamedTuple):
    """An ellipsoid in coordinates from -1 to 1 along each axis."""

    centre: Tensor  # (3,)
    radii: Tensor  # (3,)
    turned: Tensor  # (3, 3)

    def holds(self, axes: Sequence[Tensor]) -> Tensor:
        """Return True for the nodes of a grid of three axes that are inside."""
        found = torch.zeros([len(axis) for axis in axes], dtype=torch.bool)
        # a box around it, since most of a volume is far from a small organ
        near = [(a - c).abs() <= self.radii.max() for a, c in zip(axes, self.centre, strict=True)]
        box = [_run(mask) for mask in near]
        offsets = [a[run] - c for a, run, c in zip(axes, box, self.centre, strict=True)]
        along = torch.meshgrid(*offsets, indexing="ij")
        rows = torch.tensordot(self.turned, torch.stack(along), 1)
        squares = [(x / r).square() for x, r in zip(rows, self.radii, strict=True)]
        found[tuple(box)] = torch.stack(squares).sum(0) <= 1
        return found


def _run(mask: Tensor) -> slice:
    """The places of a run of True; an empty slice if there is none."""
    places = mask.nonzero()
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


class Phantoms:
    """Volumes by number, of which any part is made by itself, the same on every machine.

    Args:
        extents: Voxels along each dim.
        vary: By how many voxels less, at most, a volume extends along each dim.
        noise: Standard deviation of the noise; the body's brightness is 0.6, an organ's 1.
        seed: The seed of all volumes.
    """

    def __init__(
        self,
        extents: tuple[int, int, int] = (36, 30, 26),
        vary: int = 0,
        noise: float = 0.2,
        seed: int = 0,
    ) -> None:
        at_least(1, extents=extents)
        at_least(0, vary=vary, noise=noise, seed=seed)
        if min(extents) <= vary:
            raise ValueError(f"vary must be less than each of the extents {extents}; got {vary}.")
        self.extents, self.vary, self.noise, self.seed = extents, vary, noise, seed

    def shape(self, index: int) -> tuple[int, int, int]:
        """Return the voxels along each dim of a volume."""
        draw = self._generator(index, 0)
        less = torch.randint(self.vary + 1, (3,), generator=draw).tolist()
        x, y, z = (n - few for n, few in zip(self.extents, less, strict=True))
        return x, y, z

    def image(self, index: int, part: Sequence[slice]) -> Tensor:
        """Return the brightness of a part of a volume: (x, y, z) float32."""
        shape = self.shape(index)
        body, organs, vessels = self._scene(index)
        axes = _axes(shape, part)
        values = torch.where(body.holds(axes), BODY, AIR)
        for vessel in vessels:
            values = torch.where(vessel.holds(axes), BRIGHT, values)
        for kind, organ in organs:
            values = torch.where(organ.holds(axes), BRIGHT if kind == LESION else ORGANS, values)
        values = values * self._uneven(index, axes)
        return (values + self.noise * self._white(index, shape, part)).float()

    def label(self, index: int, part: Sequence[slice]) -> Tensor:
        """Return the class of each voxel of a part of a volume: (x, y, z) int64."""
        axes = _axes(self.shape(index), part)
        classes = torch.zeros([len(axis) for axis in axes], dtype=torch.int64)
        for kind, organ in self._scene(index)[1]:
            classes[organ.holds(axes)] = kind
        return classes

    def _scene(
        self, index: int
    ) -> tuple[_Ellipsoid, list[tuple[int, _Ellipsoid]], list[_Ellipsoid]]:
        """The body, the organs and their lesions, and the vessels."""
        draw = self._generator(index, 1)
        body = _placed(draw, (0.0, 0.0, 0.0), 0.05, (0.92, 0.88, 0.97))
        large = _placed(draw, (-0.25, -0.2, 0.0), 0.1, (0.45, 0.38, 0.55))
        small = _placed(draw, (0.45, 0.3, 0.0), 0.1, (0.22, 0.28, 0.34))
        count = int(torch.randint(MOST_LESIONS + 1, (), generator=draw))
        lesions = [(LESION, _inside(draw, large, (0.2, 0.6))) for _ in range(count)]
        organs = [(LARGE, large), (SMALL, small), *lesions]
        vessels = [_inside(draw, body, (0.75, 0.85)) for _ in range(VESSELS)]
        return body, organs, vessels

    def _uneven(self, index: int, axes: Sequence[Tensor]) -> Tensor:
        """A smooth factor, as of the coils of a scanner."""
        draw = self._generator(index, 2)
        slopes = 0.5 * torch.rand(3, generator=draw, dtype=torch.float64) - 0.25
        phases = 2 * math.pi * torch.rand(3, generator=draw, dtype=torch.float64)
        factors = [
            (slope * (2.5 * axis + phase).sin()).exp()
            for axis, slope, phase in zip(axes, slopes, phases, strict=True)
        ]
        return factors[0][:, None, None] * factors[1][:, None] * factors[2]

    def _white(self, index: int, shape: Sequence[int], part: Sequence[slice]) -> Tensor:
        # a generator for each plane, so that a part needs the noise of its own planes alone
        planes = [
            torch.randn(shape[1:], generator=self._generator(index, 3 + x))[part[1], part[2]]
            for x in range(shape[0])[part[0]]
        ]
        empty = torch.zeros(shape[1:])[part[1], part[2]].expand(0, -1, -1)
        return torch.stack(planes) if planes else empty

    def _generator(self, index: int, purpose: int) -> torch.Generator:
        number = (self.seed * 1_000_003 + index) * 100_003 + purpose
        return torch.Generator().manual_seed(number)


def _axes(shape: Sequence[int], part: Sequence[slice]) -> list[Tensor]:
    """Coordinates of the voxels' centres, from -1 to 1 over the whole volume."""
    return [
        ((2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1)[s]
        for n, s in zip(shape, part, strict=True)
    ]


def _placed(
    draw: torch.Generator,
    centre: tuple[float, float, float],
    spread: float,
    radii: tuple[float, float, float],
) -> _Ellipsoid:
    """An ellipsoid about here, about so large, turned a little."""
    random = 2 * torch.rand(9, generator=draw, dtype=torch.float64) - 1
    where = torch.tensor(centre, dtype=torch.float64) + spread * random[:3]
    sizes = torch.tensor(radii, dtype=torch.float64) * (1 + 0.12 * random[3:6])
    return _Ellipsoid(where, sizes, _rotation(0.4 * random[6:]))


def _inside(draw: torch.Generator, organ: _Ellipsoid, between: tuple[float, float]) -> _Ellipsoid:
    """A small ball within an organ, at such a share of the way to its surface."""
    random = torch.rand(5, generator=draw, dtype=torch.float64)
    direction = torch.nn.functional.normalize(2 * random[:3] - 1, dim=0)
    share = between[0] + (between[1] - between[0]) * random[3]
    where = organ.centre + organ.turned.T @ (share * direction * organ.radii)
    sizes = (0.13 + 0.09 * random[4]) * torch.ones(3, dtype=torch.float64)
    return _Ellipsoid(where, sizes, torch.eye(3, dtype=torch.float64))


def _rotation(angles: Tensor) -> Tensor:
    """The rotation by an angle about each axis in turn."""
    x, y, z = angles
    generators = torch.zeros(3, 3, dtype=torch.float64)
    generators[0, 1], generators[0, 2], generators[1, 2] = -z, y, -x
    return torch.linalg.matrix_exp(generators - generators.T)
