"""Weather that is made up: smooth waves that travel around the globe, the same on every machine.

Each variable at each level is a profile from pole to pole plus waves of its own. A wave of number m
is cos^m of the latitude, so the poles have one value, and it travels at a speed that depends on m.
So a state follows from the two states before it, and no state comes twice.

Shapes: h of H latitudes, w of W longitudes.
"""

import math
import zlib
from collections.abc import Sequence
from datetime import datetime, timedelta

import torch
from torch import Tensor

from lightning_modules.shared.numbers import at_least
from lightning_modules.shared.optional import optional

WAVES = 6  # each variable has so many at each level
DAY_H = 24.0


class Waves:
    """States of made-up weather, six hours apart, of which any part is computed by itself.

    Args:
        height: Number of latitudes H, from pole to pole.
        width: Number of longitudes W.
        levels: Pressure levels in hPa.
        seed: The seed of the waves.
    """

    def __init__(self, height: int, width: int, levels: Sequence[int], seed: int = 0) -> None:
        at_least(4, height=height, width=width)
        at_least(0, seed=seed)
        self.latitudes = torch.linspace(90, -90, height, dtype=torch.float64)
        self.longitudes = torch.arange(width, dtype=torch.float64) * (360 / width)
        self.levels = tuple(levels)
        self.seed = seed
        self.steps: int | None = None  # there is no last one

    def time(self, step: int) -> datetime:
        """Return the time of a state."""
        return datetime(2020, 1, 1) + timedelta(hours=6 * step)

    def surface(self, name: str, step: int, rows: slice, columns: slice) -> Tensor:
        """Return a part of a surface variable: (h, w)."""
        return self._field(name, 6 * step, rows, columns)

    def upper(self, name: str, step: int, rows: slice, columns: slice) -> Tensor:
        """Return a part of a variable at all levels: (C, h, w)."""
        each = [self._field(f"{name}_{n}", 6 * step, rows, columns) for n in self.levels]
        return torch.stack(each)

    def static(self, name: str) -> Tensor:
        """Return all of a variable that stays: (H, W)."""
        values = self._field(f"static {name}", 0.0, slice(None), slice(None), scale=name)
        return values.sigmoid() if name == "lsm" else values

    def _field(
        self, name: str, hours: float, rows: slice, columns: slice, *, scale: str = ""
    ) -> Tensor:
        normal = optional("aurora.normalisation", "made-up weather", "aurora")
        draw = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        size, phase, tilt = torch.rand(3, WAVES, generator=draw, dtype=torch.float64)
        profile = 0.5 * torch.randn(2, generator=draw, dtype=torch.float64)
        m = torch.arange(1, WAVES + 1, dtype=torch.float64)
        eastwards = (12 - 20 / m) * (hours / DAY_H)  # degrees; the longest travel westwards
        latitude = self.latitudes[rows, None].deg2rad()
        angle = 2 * math.pi * phase - m * eastwards.deg2rad() + 2 * tilt * latitude.sin()
        height = (0.3 + size) * latitude.cos() ** m
        around = m[:, None] * self.longitudes[columns].deg2rad()
        waves = (height * angle.cos()) @ around.cos() - (height * angle.sin()) @ around.sin()
        zonal = profile[0] * (2 * latitude).cos() + profile[1] * latitude.sin()
        values = zonal + 0.6 * waves
        scale = scale or name
        return (values * normal.scales[scale] + normal.locations[scale]).float()
