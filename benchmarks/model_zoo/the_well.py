"""the_well: the networks of its benchmark of physical simulations.

Its FNO and TFNO are those of an older neuraloperator, and do not run on 2.0.
"""

from the_well.benchmark import models

from benchmarks.model_zoo import Case, Float32, row

PLANE = (2, (24, 16))
SPACE = (3, (16, 12, 8))


def flat(kind, *arguments, **options):
    return Case(lambda: kind(3, 2, *PLANE, *arguments, **options), [(1, 3, *PLANE[1])], (2, 3))


CASES = {
    "refno": row(models.ReFNO, 3, 2, *PLANE, 8, 2, on=(1, *PLANE[1], 3), split=(1, 2), within=1e-5),
    "unet_classic": row(models.UNetClassic, 3, 2, 2, (32, 16), 4, on=(2, 3, 32, 16)),
    "unet_classic_3d": row(models.UNetClassic, 3, 2, 3, (16, 16, 16), 2, on=(2, 3, 16, 16, 16)),
    "unet_convnext": flat(models.UNetConvNext, stages=2, init_features=8),
    "afno": row(models.AFNO, 3, 2, *PLANE, 16, 2, 4, 4, on=(1, *PLANE[1], 3), split=(1, 2),
        within=1e-4, wrap=Float32),
    "avit": row(models.AViT, 3, 2, 2, (32, 48), 48, 2, 2, on=(1, 32, 48, 3), split=(1, 2)),
    "dilated_resnet": flat(models.DilatedResNet, blocks=2, levels_per_block=2, hidden_dim=8),
}  # fmt: skip
