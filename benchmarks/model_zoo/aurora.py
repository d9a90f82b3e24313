"""microsoft-aurora: the model of weather, with less width and depth, on a globe of 24 x 48."""

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import aurora
import torch
from aurora.normalisation import locations, scales
from torch import Tensor

from benchmarks.model_zoo import Apply, Case

LEVELS = (850, 500, 250)
SMALL: dict[str, Any] = {
    "embed_dim": 16, "num_heads": 4, "encoder_depths": (2, 2), "encoder_num_heads": (2, 4),
    "decoder_depths": (2, 2), "decoder_num_heads": (4, 2), "window_size": (2, 3, 4),
}  # fmt: skip


def batch_of(
    model: Any, surface: Tensor, static: Tensor, upper: Tensor, names: Sequence[str]
) -> aurora.Batch:
    """What the model takes, of normalised fields."""
    height, width = surface.shape[-2:]

    def scaled(values: Tensor, name: str) -> Tensor:
        return values * scales[name] + locations[name]

    return aurora.Batch(
        {n: scaled(surface[:, :, i], n) for i, n in enumerate(names)},
        {n: scaled(static[i], n) for i, n in enumerate(model.static_vars)},
        {n: upper[:, :, i] * _scale(n) + _location(n) for i, n in enumerate(model.atmos_vars)},
        aurora.Metadata(
            torch.linspace(90, -90, height, dtype=torch.float64),
            torch.arange(width, dtype=torch.float64) * (360 / width),
            (datetime(2020, 6, 1, 12),), LEVELS,
        ),
    )  # fmt: skip


def _scale(name: str) -> Tensor:
    return torch.tensor([[scales[f"{name}_{level}"]] for level in LEVELS])[..., None].double()


def _location(name: str) -> Tensor:
    return torch.tensor([[locations[f"{name}_{level}"]] for level in LEVELS])[..., None].double()


def predicted(model: Any, surface: Tensor, static: Tensor, upper: Tensor) -> list[Tensor]:
    """The normalised fields of the next step."""
    return fields(model(batch_of(model, surface, static, upper, model.surf_vars)))


def rolled_out(model: Any, surface: Tensor, static: Tensor, upper: Tensor) -> list[Tensor]:
    """Those of two steps."""
    first = batch_of(model, surface, static, upper, model.surf_vars)
    return [x for step in aurora.rollout(model, first, 2) for x in fields(step)]


def fields(batch: aurora.Batch) -> list[Tensor]:
    batch = dataclasses.replace(batch, static_vars={}).normalise({})
    return [*batch.surf_vars.values(), *batch.atmos_vars.values()]


def case(kind: Any, run: Any = predicted, height: int = 24, **options: Any) -> Case:
    return Case(
        lambda: Apply(run, kind(**SMALL, **options)),
        [(1, 2, 4, height, 48), (3, height, 48), (1, 2, 5, len(LEVELS), height, 48)],
        (4, 5), 1e-5,
    )  # fmt: skip


CASES = {
    "pretrained": case(aurora.AuroraPretrained),
    "uneven_latitudes": case(aurora.AuroraPretrained, height=28),
    "fine_tuned": case(aurora.Aurora),
    "twelve_hours": case(aurora.Aurora12hPretrained),
    "patch_of_six": case(aurora.AuroraHighRes, patch_size=6, stabilise_level_agg=True),
    "two_steps": case(aurora.Aurora, rolled_out, lora_mode="all"),
}
