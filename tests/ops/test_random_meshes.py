"""Cases of all tables on meshes that nobody chose, of up to 16 ranks, which are simulated.

The variable LIGHTNING_SHARD_SEED draws other cases, and other dims that are split.
"""

import math
import os
import random

import pytest

from lightning_shard import simulate
from tests.ops.families import FAMILIES, check

MESHES = [(4,), (5,), (7,), (16,), (2, 3), (3, 5), (4, 4), (1, 6), (1,), (2, 1)]
FIRST = int(os.environ.get("LIGHTNING_SHARD_SEED", "0"))


@pytest.mark.quick_rows("(4,)", "(1,)", "(2, 1)")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cases_on_a_mesh_equal_one_process(mesh):
    draw = random.Random(f"{mesh} {FIRST}")
    chosen = [_drawn(draw, len(mesh)) for _ in range(6)]

    def body():
        for family, case, dims in chosen:
            check(family, case, dims, mesh)

    simulate(body, processes=math.prod(mesh))


def test_pairs_of_a_rank_without_rows():
    """Whose strides say nothing; found by running all cases on 16 ranks."""
    simulate(check, "pointwise", "pairs_back", [2], (16,), processes=16)


def _drawn(draw: random.Random, axes: int) -> tuple[str, str, list[int]]:
    several = [name for name, family in FAMILIES.items() if {2, 3} <= {*family.dims}]
    family = draw.choice(several if axes == 2 else list(FAMILIES))
    case = draw.choice(list(FAMILIES[family].cases))
    return family, case, [2, 3] if axes == 2 else [draw.choice(list(FAMILIES[family].dims))]
