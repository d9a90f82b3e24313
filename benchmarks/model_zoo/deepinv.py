"""deepinv: denoisers, unrolled networks and forward models of inverse problems."""

import deepinv
import torch
from deepinv import models, physics
from torch import nn

from benchmarks.model_zoo import Case, Float64Defaults, row

IMAGE = (1, 3, 24, 32)
KERNEL = torch.rand(1, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(3 * 24 * 32).reshape(3, 24, 32) % 5 > 1).double()
SIGMA = 0.1


def conv(channels=3):
    return nn.Conv2d(channels, channels, 3, padding=1)


def network(make):
    return Case(lambda: Float64Defaults(lambda m, x: m(x, SIGMA), make()), [IMAGE], (2, 3))


def without_weights(make):
    return Case(
        lambda: Float64Defaults(lambda c, m, x: m(c(x), SIGMA), conv(), make()), [IMAGE], (2, 3)
    )


def there_and_back(make, shape=IMAGE):
    """A measurement of what a convolution gives, and its adjoint."""
    return Case(
        lambda: Float64Defaults(
            lambda c, p, x: p.A_adjoint(p.A(c(x))), conv(shape[1]), make().double()
        ),
        [shape], (2, 3),
    )  # fmt: skip


def unrolled():
    return deepinv.unfolded.unfolded_builder(
        "PGD", params_algo={"stepsize": [0.5] * 3, "lambda": [0.1] * 3, "g_param": [0.1] * 3},
        trainable_params=["stepsize"], data_fidelity=deepinv.optim.data_fidelity.L2(),
        prior=deepinv.optim.prior.PnP(models.DnCNN(3, 3, depth=3, nf=8, pretrained=None)),
        max_iter=3,
    )  # fmt: skip


def blur(padding):
    return physics.Blur(filter=KERNEL, padding=padding)


NO_WEIGHTS = {"pretrained": None}
SMALL = {"nc": (8, 8, 8, 8), "nb": 1, **NO_WEIGHTS}
COILS = torch.complex(*torch.linspace(-1, 1, 2 * 4 * 24 * 32).double().reshape(2, 1, 4, 24, 32))
CASES = {
    "drunet": network(lambda: models.DRUNet(3, 3, **SMALL)),
    "dncnn": network(lambda: models.DnCNN(3, 3, depth=4, nf=8, **NO_WEIGHTS)),
    "unet": network(lambda: models.UNet(3, 3, scales=3)),
    "restormer": network(lambda: models.Restormer(3, 3, dim=8, num_blocks=[1] * 4,
        num_refinement_blocks=1, **NO_WEIGHTS)),
    "swinir": network(lambda: models.SwinIR(img_size=32, in_chans=3, embed_dim=12, depths=[2],
        num_heads=[2], window_size=8, upscale=1, **NO_WEIGHTS)),
    "icnn": row(models.ICNN, in_channels=3, num_filters=8, kernel_dim=3, num_layers=3, on=IMAGE,
        wrap=Float64Defaults),
    "tv": without_weights(lambda: models.TVDenoiser(n_it_max=5)),
    "tgv": without_weights(lambda: models.TGVDenoiser(n_it_max=5)),
    "wavelet": without_weights(lambda: models.WaveletDenoiser(level=2)),
    "median": without_weights(models.MedianFilter),
    "bilateral": without_weights(models.BilateralFilter),
    "unrolled_pgd": Case(
        lambda: Float64Defaults(lambda m, p, x: m(p(x), p), unrolled(), blur("circular")),
        [IMAGE], (2, 3),
    ),
    "blur": there_and_back(lambda: blur("circular")),
    "blur_valid": there_and_back(lambda: blur("valid")),
    "blur_reflect": there_and_back(lambda: blur("reflect")),
    "blur_fft": there_and_back(lambda: physics.BlurFFT(img_size=(3, 24, 32), filter=KERNEL)),
    "downsampling": there_and_back(
        lambda: physics.Downsampling(img_size=(3, 24, 32), factor=2, filter="gaussian")
    ),
    "inpainting": there_and_back(lambda: physics.Inpainting((3, 24, 32), mask=MASK)),
    "demosaicing": there_and_back(lambda: physics.Demosaicing(img_size=(3, 24, 32))),
    "decolorize": there_and_back(physics.Decolorize),
    "mri": there_and_back(lambda: physics.MRI(img_size=(24, 32), mask=MASK[:1]), (1, 2, 24, 32)),
    "multicoil_mri": there_and_back(
        lambda: physics.MultiCoilMRI(img_size=(24, 32), mask=MASK[:1], coil_maps=COILS),
        (1, 2, 24, 32),
    ),
    "tomography": Case(lambda: Float64Defaults(lambda c, p, x: p.A(c(x)), conv(1),
        physics.Tomography(angles=7, img_width=24, normalize=False).double()), [(1, 1, 24, 24)],
        (2, 3)),
}  # fmt: skip
