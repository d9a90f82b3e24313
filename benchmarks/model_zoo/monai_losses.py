"""MONAI: losses of segmentation, registration and synthesis."""

import torch
from monai import losses

from benchmarks.model_zoo import Apply, Case

FLOAT32 = 1e-5  # computed in float32


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


def loss(make, target=None, shape=(2, 3, 9, 7), tolerance=1e-10):
    return Case(
        lambda: Apply(lambda f, x, y: f(x, y), make()), [shape, target or one_hot(*shape)], (2, 3),
        tolerance,
    )  # fmt: skip


CASES = {
    "dice": loss(lambda: losses.DiceLoss(softmax=True)),
    "dice_squared": loss(
        lambda: losses.DiceLoss(sigmoid=True, squared_pred=True, batch=True, jaccard=True)
    ),
    "dice_to_onehot": loss(lambda: losses.DiceLoss(softmax=True, to_onehot_y=True),
        labels(2, 1, 9, 7)),
    "dice_ce": loss(lambda: losses.DiceCELoss(softmax=True, to_onehot_y=True), labels(2, 1, 9, 7)),
    "dice_focal": loss(lambda: losses.DiceFocalLoss(softmax=True, to_onehot_y=True),
        labels(2, 1, 9, 7)),
    "generalized_dice": Case(lambda: Apply(lambda f, x, y: f(x, y.detach()),
        losses.GeneralizedDiceLoss(softmax=True)), [(2, 3, 9, 7), one_hot(2, 3, 9, 7)], (2, 3),
        FLOAT32),
    "focal": loss(lambda: losses.FocalLoss(gamma=2.0)),
    "focal_softmax": loss(lambda: losses.FocalLoss(use_softmax=True, alpha=0.5), tolerance=FLOAT32),
    "tversky": loss(lambda: losses.TverskyLoss(softmax=True)),
    "ssim": loss(lambda: losses.SSIMLoss(2, win_size=5), numbers(2, 1, 19, 17), (2, 1, 19, 17),
        FLOAT32),
    "masked_dice": Case(lambda: Apply(lambda f, x, y, m: f(x, y, m.abs()),
        losses.MaskedDiceLoss(sigmoid=True)), [(2, 3, 9, 7), one_hot(2, 3, 9, 7), (2, 1, 9, 7)],
        (2, 3)),
    "deep_supervision": loss(lambda: losses.DeepSupervisionLoss(losses.DiceLoss(softmax=True)),
        tolerance=FLOAT32),
    "lncc": loss(lambda: losses.LocalNormalizedCrossCorrelationLoss(2), numbers(2, 1, 19, 17),
        (2, 1, 19, 17)),
    "mutual_information": Case(lambda: Apply(lambda f, x, y: f(x.sigmoid(), y.sigmoid()),
        losses.GlobalMutualInformationLoss(num_bins=5)), [(2, 1, 9, 7), (2, 1, 9, 7)], (2, 3),
        FLOAT32),
    "bending": Case(lambda: losses.BendingEnergyLoss(), [(2, 2, 11, 9)], (2, 3)),
    "diffusion_loss": Case(lambda: losses.DiffusionLoss(), [(2, 2, 11, 9)], (2, 3)),
    "unified_focal": loss(lambda: losses.AsymmetricUnifiedFocalLoss(), one_hot(2, 2, 9, 7),
        (2, 2, 9, 7)),
    "wasserstein_dice": Case(lambda: Apply(lambda f, x, y: f(x, y),
        losses.GeneralizedWassersteinDiceLoss(1.0 - torch.eye(3).numpy())),
        [(2, 3, 9, 7), labels(2, 1, 9, 7)], (2, 3)),
    "hausdorff": loss(lambda: losses.HausdorffDTLoss(softmax=True)),
    "contrastive": Case(lambda: Apply(lambda f, x, y: f(x, y), losses.ContrastiveLoss()),
        [(4, 12), (4, 12)], (1,)),
    "barlow": Case(lambda: Apply(lambda f, x, y: f(x, y), losses.BarlowTwinsLoss()),
        [(4, 12), (4, 12)], (1,)),
    "adversarial": Case(
        lambda: Apply(lambda f, x: f(x, True, False), losses.PatchAdversarialLoss()),
        [(2, 1, 9, 7)],
        (2, 3),
    ),
    "nacl": Case(lambda: Apply(lambda f, x, y: f(x, y), losses.NACLLoss(3, 2)),
        [(2, 3, 9, 7), labels(2, 9, 7)], (2, 3)),
    "jukebox": loss(lambda: losses.JukeboxLoss(2),
        lambda: torch.randn(2, 3, 9, 7, dtype=torch.float64)),
    "cldice": loss(lambda: losses.SoftclDiceLoss(iter_=2)),
}  # fmt: skip
