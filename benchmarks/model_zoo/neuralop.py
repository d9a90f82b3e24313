"""neuraloperator: its models and losses, in float64 throughout."""

import torch
from neuralop import models as m
from neuralop.losses import H1Loss, LpLoss

from benchmarks.model_zoo import Apply, Case
from tests.double_fno import to_double


def net(make):
    return lambda: to_double(make())


def loss(make):
    return Case(
        lambda: Apply(lambda f, x, y: f(x, y), Wrapped(make())), [(2, 1, 13, 10)] * 2, (2, 3)
    )


class Wrapped(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x, y):
        return self.f(x, y)


def fno(kind=m.FNO, modes=(4, 4), **options):
    options = {"in_channels": 1, "out_channels": 1, "hidden_channels": 4, "n_layers": 2} | options
    return net(lambda: kind(n_modes=modes, **options))


def uno(**options):
    return net(
        lambda: m.UNO(in_channels=1, out_channels=1, hidden_channels=4, uno_out_channels=[4, 4, 4],
        n_layers=3, uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear", **options),
    )  # fmt: skip


def codano(**options):
    return net(
        lambda: m.CODANO(output_variable_codimension=1, hidden_variable_codimension=2,
        lifting_channels=4, n_layers=2, n_modes=[[4, 4], [4, 4]], n_heads=[1, 1],
        per_layer_scaling_factors=[[1, 1], [1, 1]], attention_scaling_factors=[1, 1], **options),
    )  # fmt: skip


FIELD = (2, 1, 17, 14)
CASES = {
    "fno": Case(fno(), [FIELD], (2, 3)),
    "fno_1d": Case(fno(modes=(5,)), [(2, 1, 23)], (2,)),
    "fno_3d": Case(fno(modes=(4, 3, 4)), [(1, 1, 9, 8, 7)], (2, 3, 4)),
    "fno_full_modes": Case(fno(modes=(17, 14)), [FIELD], (2, 3)),
    "fno_instance_norm": Case(fno(norm="instance_norm", fno_skip="identity",
        channel_mlp_skip="identity"), [FIELD], (2, 3)),
    "fno_group_norm": Case(fno(norm="group_norm", preactivation=True), [FIELD], (2, 3)),
    "fno_batch_norm": Case(fno(norm="batch_norm"), [FIELD], (2, 3)),
    "fno_padded": Case(fno(domain_padding=0.2), [FIELD], (2, 3)),
    "fno_scaling": Case(fno(resolution_scaling_factor=[1, 2]), [FIELD], (2, 3)),
    "fno_separable": Case(fno(separable=True), [FIELD], (2, 3)),
    "fno_max_modes": Case(fno(max_n_modes=(6, 6), stabilizer="tanh"), [FIELD], (2, 3)),
    "fno_no_embedding": Case(fno(positional_embedding=None, use_channel_mlp=False), [FIELD],
        (2, 3)),
    "tfno_tucker": Case(fno(m.TFNO, rank=0.5, factorization="tucker"), [FIELD], (2, 3)),
    "tfno_cp": Case(fno(m.TFNO, rank=0.5, factorization="cp", implementation="factorized"), [FIELD],
        (2, 3)),
    "tfno_tt": Case(fno(m.TFNO, rank=0.5, factorization="tt", implementation="factorized"), [FIELD],
        (2, 3)),
    "tfno_reconstructed": Case(fno(m.TFNO, rank=0.5, factorization="tucker",
        implementation="reconstructed"), [FIELD], (2, 3)),
    "uno": Case(uno(), [(2, 1, 16, 14)], (2, 3)),
    "uno_skip": Case(uno(horizontal_skips_map={2: 0}, domain_padding=0.1), [(2, 1, 16, 14)],
        (2, 3)),
    "codano": Case(codano(), [(2, 2, 16, 14)], (2, 3)),
    "uqno": Case(net(lambda: m.UQNO(m.FNO((4, 4), 1, 1, 4, n_layers=1))), [FIELD], (2, 3)),
    "l2_loss": loss(lambda: LpLoss(d=2, p=2)),
    "l1_loss": loss(lambda: LpLoss(d=2, p=1, reduction="mean")),
    "h1_loss": loss(lambda: H1Loss(d=2)),
    "h1_loss_fixed": loss(lambda: H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)),
}  # fmt: skip


def local(**options):
    return net(
        lambda: m.LocalNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=4,
        n_layers=2, default_in_shape=FIELD[2:], **options),
    )  # fmt: skip


def spherical():
    return m.SFNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=4, n_layers=2)


if hasattr(m, "LocalNO"):  # with torch-harmonics 0.7.4, not with 0.9
    CASES |= {
        "local_no": Case(local(), [FIELD], (2, 3)),
        "local_no_differences": Case(local(disco_layers=False), [FIELD], (2, 3)),
        "local_no_disco": Case(local(diff_layers=False), [FIELD], (2, 3)),
        "sfno": Case(net(spherical), [(2, 1, 12, 24)], (2, 3)),
    }
