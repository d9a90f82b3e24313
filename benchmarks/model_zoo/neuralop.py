"""neuraloperator: its models and losses, in float64 throughout.

GINO goes between point clouds and grids, with neuraloperator's own search for neighbours. Its
fallback for torch_scatter sums into tensors of the default dtype.
"""

import torch
from neuralop import models as m
from neuralop.losses import H1Loss, LpLoss

from benchmarks.model_zoo import Apply, Float64Defaults, row
from tests.double_fno import to_double

FIELD = (2, 1, 17, 14)
ONE = {"in_channels": 1, "out_channels": 1, "hidden_channels": 4}
CP, TT, TUCKER = ({"rank": 0.5, "factorization": name} for name in ("cp", "tt", "tucker"))
FACTORIZED = {"implementation": "factorized"}
UNO = {
    "uno_out_channels": [4, 4, 4], "n_layers": 3, "uno_n_modes": [[4, 4]] * 3,
    "uno_scalings": [[1, 1], [0.5, 0.5], [2, 2]], "channel_mlp_skip": "linear", **ONE,
}  # fmt: skip
CODANO = {
    "output_variable_codimension": 1, "hidden_variable_codimension": 2, "lifting_channels": 4,
    "n_layers": 2, "n_modes": [[4, 4], [4, 4]], "n_heads": [1, 1],
    "per_layer_scaling_factors": [[1, 1], [1, 1]], "attention_scaling_factors": [1, 1],
}  # fmt: skip
GINO = {
    "in_channels": 2, "out_channels": 2, "gno_coord_dim": 2, "in_gno_radius": 0.2,
    "out_gno_radius": 0.2, "in_gno_channel_mlp_hidden_layers": [8],
    "out_gno_channel_mlp_hidden_layers": [8], "gno_use_open3d": False,
    "gno_use_torch_scatter": False, "fno_in_channels": 2, "fno_hidden_channels": 8,
    "fno_n_modes": (4, 4), "fno_n_layers": 2,
}  # fmt: skip


def double(kind, **options):
    return to_double(kind(**options))


def fno(kind=m.FNO, modes=(4, 4), on=FIELD, **options):
    return row(double, kind, n_modes=modes, **ONE, n_layers=2, **options, on=on)


def uno(**options):
    return row(double, m.UNO, **UNO, **options, on=(2, 1, 16, 14))


def uqno():
    return to_double(m.UQNO(m.FNO((4, 4), 1, 1, 4, n_layers=1)))


def loss(function):
    return row(Apply, function, on=[(2, 1, 13, 10)] * 2)


def cloud(count, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(1, count, 2, generator=random, dtype=torch.float64)


def grid():
    side = torch.linspace(0, 1, 6, dtype=torch.float64)
    return torch.stack(torch.meshgrid(side, side, indexing="ij"), -1)[None]


def gino(*, each, **options):
    return row(
        double, m.GINO, **GINO, **options, each=each,
        on=[lambda: cloud(23, 1), grid, lambda: cloud(17, 2), (2, 23, 2)],
        run=lambda f, p, grid, to, x: f(p, grid, to, x=x), wrap=Float64Defaults,
    )  # fmt: skip


CASES = {
    "fno": fno(),
    "fno_1d": fno(modes=(5,), on=(2, 1, 23)),
    "fno_3d": fno(modes=(4, 3, 4), on=(1, 1, 9, 8, 7)),
    "fno_full_modes": fno(modes=(17, 14)),
    "fno_instance_norm": fno(norm="instance_norm", fno_skip="identity",
        channel_mlp_skip="identity"),
    "fno_group_norm": fno(norm="group_norm", preactivation=True),
    "fno_batch_norm": fno(norm="batch_norm"),
    "fno_padded": fno(domain_padding=0.2),
    "fno_scaling": fno(resolution_scaling_factor=[1, 2]),
    "fno_separable": fno(separable=True),
    "fno_max_modes": fno(max_n_modes=(6, 6), stabilizer="tanh"),
    "fno_no_embedding": fno(positional_embedding=None, use_channel_mlp=False),
    "tfno_tucker": fno(m.TFNO, **TUCKER),
    "tfno_cp": fno(m.TFNO, **CP, **FACTORIZED),
    "tfno_tt": fno(m.TFNO, **TT, **FACTORIZED),
    "tfno_reconstructed": fno(m.TFNO, **TUCKER, implementation="reconstructed"),
    "uno": uno(),
    "uno_skip": uno(horizontal_skips_map={2: 0}, domain_padding=0.1),
    "codano": row(double, m.CODANO, **CODANO, on=(2, 2, 16, 14)),
    "uqno": row(uqno, on=FIELD),
    "l2_loss": loss(LpLoss(d=2, p=2)),
    "l1_loss": loss(LpLoss(d=2, p=1, reduction="mean")),
    "h1_loss": loss(H1Loss(d=2)),
    "h1_loss_fixed": loss(H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)),
    "gino": gino(each=[(1, 1)] * 4),
    "gino_weighted": gino(each=[(1, 1), (1, 2), (1, 1), (1, 1)], gno_weighting_function="half_cos",
        out_gno_transform_type="nonlinear"),
}  # fmt: skip
if hasattr(m, "LocalNO"):  # with torch-harmonics 0.7.4, not with 0.9
    CASES |= {
        "local_no": fno(m.LocalNO, default_in_shape=FIELD[2:]),
        "local_no_differences": fno(m.LocalNO, default_in_shape=FIELD[2:], disco_layers=False),
        "local_no_disco": fno(m.LocalNO, default_in_shape=FIELD[2:], diff_layers=False),
        "sfno": fno(m.SFNO, modes=(6, 6), on=(2, 1, 12, 24)),
    }
