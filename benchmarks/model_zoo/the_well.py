"""the_well: the networks of its benchmark of physical simulations.

Its FNO and TFNO are those of an older neuraloperator, and do not run on 2.0.
"""

from the_well.benchmark import models

from benchmarks.model_zoo import Case, Float32, called

PLANE = (2, (24, 16))
SPACE = (3, (16, 12, 8))


def flat(kind, *arguments, **options):
    return Case(lambda: kind(3, 2, *PLANE, *arguments, **options), [(1, 3, *PLANE[1])], (2, 3))


CASES = {
    "refno": Case(lambda: models.ReFNO(3, 2, *PLANE, 8, 2), [(1, *PLANE[1], 3)], (1, 2), 1e-5),
    "unet_classic": Case(lambda: models.UNetClassic(3, 2, 2, (32, 16), 4), [(2, 3, 32, 16)],
        (2, 3)),
    "unet_classic_3d": Case(lambda: models.UNetClassic(3, 2, 3, (16, 16, 16), 2),
        [(2, 3, 16, 16, 16)], (2, 3, 4)),
    "unet_convnext": flat(models.UNetConvNext, stages=2, init_features=8),
    "afno": Case(lambda: Float32(called, models.AFNO(3, 2, *PLANE, 16, 2, 4, 4)),
        [(1, *PLANE[1], 3)], (1, 2), 1e-4),
    "avit": Case(lambda: models.AViT(3, 2, 2, (32, 48), 48, 2, 2), [(1, 32, 48, 3)], (1, 2)),
    "dilated_resnet": flat(models.DilatedResNet, blocks=2, levels_per_block=2, hidden_dim=8),
}  # fmt: skip
