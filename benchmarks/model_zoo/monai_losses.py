"""MONAI: losses of segmentation, registration and synthesis."""

import torch
from monai import losses

from benchmarks.model_zoo import row

FLOAT32 = 1e-5  # computed in float32
MAPS = (2, 3, 9, 7)


def labels(*shape):
    return lambda: torch.randint(3, shape)


def one_hot(*shape):
    """Targets (B, C, ...), one class each."""

    def make():
        classes = torch.randint(shape[1], (shape[0], 1, *shape[2:]))
        return torch.zeros(shape, dtype=torch.float64).scatter_(1, classes, 1.0)

    return make


def numbers(*shape):
    return lambda: torch.rand(shape, dtype=torch.float64)


def supervised():
    return losses.DeepSupervisionLoss(losses.DiceLoss(softmax=True))


PAIR = [MAPS, one_hot(*MAPS)]
CLASSES = [MAPS, labels(2, 1, 9, 7)]
IMAGES = [(2, 1, 19, 17), numbers(2, 1, 19, 17)]
TABLES = [(4, 12), (4, 12)]
DISTANCES = 1.0 - torch.eye(3).numpy()
CASES = {
    "dice": row(losses.DiceLoss, softmax=True, on=PAIR),
    "dice_squared": row(losses.DiceLoss, sigmoid=True, squared_pred=True, batch=True, jaccard=True,
        on=PAIR),
    "dice_to_onehot": row(losses.DiceLoss, softmax=True, to_onehot_y=True, on=CLASSES),
    "dice_ce": row(losses.DiceCELoss, softmax=True, to_onehot_y=True, on=CLASSES),
    "dice_focal": row(losses.DiceFocalLoss, softmax=True, to_onehot_y=True, on=CLASSES),
    "generalized_dice": row(losses.GeneralizedDiceLoss, softmax=True, on=PAIR, within=FLOAT32,
        run=lambda f, x, y: f(x, y.detach())),
    "focal": row(losses.FocalLoss, gamma=2.0, on=PAIR),
    "focal_softmax": row(losses.FocalLoss, use_softmax=True, alpha=0.5, on=PAIR, within=FLOAT32),
    "tversky": row(losses.TverskyLoss, softmax=True, on=PAIR),
    "ssim": row(losses.SSIMLoss, 2, win_size=5, on=IMAGES, within=FLOAT32),
    "masked_dice": row(losses.MaskedDiceLoss, sigmoid=True, on=[*PAIR, (2, 1, 9, 7)],
        run=lambda f, x, y, m: f(x, y, m.abs())),
    "deep_supervision": row(supervised, on=PAIR, within=FLOAT32),
    "lncc": row(losses.LocalNormalizedCrossCorrelationLoss, 2, on=IMAGES),
    "mutual_information": row(losses.GlobalMutualInformationLoss, num_bins=5,
        on=[(2, 1, 9, 7), (2, 1, 9, 7)], within=FLOAT32,
        run=lambda f, x, y: f(x.sigmoid(), y.sigmoid())),
    "bending": row(losses.BendingEnergyLoss, on=(2, 2, 11, 9)),
    "diffusion_loss": row(losses.DiffusionLoss, on=(2, 2, 11, 9)),
    "unified_focal": row(losses.AsymmetricUnifiedFocalLoss, on=[(2, 2, 9, 7), one_hot(2, 2, 9, 7)]),
    "wasserstein_dice": row(losses.GeneralizedWassersteinDiceLoss, DISTANCES, on=CLASSES),
    "hausdorff": row(losses.HausdorffDTLoss, softmax=True, on=PAIR),
    "contrastive": row(losses.ContrastiveLoss, on=TABLES, split=(1,)),
    "barlow": row(losses.BarlowTwinsLoss, on=TABLES, split=(1,)),
    "adversarial": row(losses.PatchAdversarialLoss, on=(2, 1, 9, 7),
        run=lambda f, x: f(x, True, False)),
    "nacl": row(losses.NACLLoss, 3, 2, on=[MAPS, labels(2, 9, 7)]),
    "jukebox": row(losses.JukeboxLoss, 2,
        on=[MAPS, lambda: torch.randn(MAPS, dtype=torch.float64)]),
    "cldice": row(losses.SoftclDiceLoss, iter_=2, on=PAIR),
}  # fmt: skip
