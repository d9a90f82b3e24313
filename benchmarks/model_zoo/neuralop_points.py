"""neuraloperator's operators between point clouds and grids, with its own search for neighbours."""

import torch
from neuralop import models as m

from benchmarks.model_zoo import Apply, Case
from tests.double_fno import to_double

OPTIONS = {
    "gno_coord_dim": 2,
    "gno_use_open3d": False,
    "gno_use_torch_scatter": False,
    "fno_n_modes": (4, 4),
    "fno_n_layers": 2,
}


def in_double(function):
    """Its fallback for torch_scatter sums into tensors of the default dtype."""

    def run(*args):
        torch.set_default_dtype(torch.float64)
        try:
            return function(*args)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


def cloud(count, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(1, count, 2, generator=random, dtype=torch.float64)


def grid(n):
    side = torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.stack(torch.meshgrid(side, side, indexing="ij"), -1)[None]


def gino(**options):
    return to_double(
        m.GINO(in_channels=2, out_channels=2, in_gno_radius=0.2, out_gno_radius=0.2,
        in_gno_channel_mlp_hidden_layers=[8], out_gno_channel_mlp_hidden_layers=[8],
        fno_in_channels=2, fno_hidden_channels=8, **OPTIONS, **options),
    )  # fmt: skip


CASES = {
    "gino": Case(lambda: Apply(in_double(lambda f, p, grid, to, x: f(p, grid, to, x=x)), gino()),
        [lambda: cloud(23, 1), lambda: grid(6), lambda: cloud(17, 2), (2, 23, 2)],
        each=[(1, 1)] * 4),
    "gino_weighted": Case(lambda: Apply(in_double(lambda f, p, grid, to, x: f(p, grid, to, x=x)),
        gino(gno_weighting_function="half_cos", out_gno_transform_type="nonlinear")),
        [lambda: cloud(23, 1), lambda: grid(6), lambda: cloud(17, 2), (2, 23, 2)],
        each=[(1, 1), (1, 2), (1, 1), (1, 1)]),
}  # fmt: skip
