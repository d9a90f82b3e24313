"""piq: measures of the quality of images, as losses."""

import piq
import torch
from torch import nn

from benchmarks.model_zoo import Case, Float64Defaults

SCALES = torch.tensor([0.5, 0.5], dtype=torch.float64)


def of_two(function, height=24, width=32):
    return Case(
        lambda: Float64Defaults(
            lambda c, x, y: function(torch.sigmoid(c(x)), torch.sigmoid(y)),
            nn.Conv2d(3, 3, 3, padding=1),
        ),
        [(2, 3, height, width)] * 2, (2, 3),
    )  # fmt: skip


CASES = {
    "ssim": of_two(lambda x, y: piq.ssim(x, y, kernel_size=7, downsample=False)),
    "ms_ssim": of_two(lambda x, y: piq.multi_scale_ssim(x, y, kernel_size=3, scale_weights=SCALES)),
    "psnr": of_two(piq.psnr),
    "total_variation": of_two(lambda x, y: piq.total_variation(x - y)),
    "vif": of_two(piq.vif_p, 64, 96),
    "fsim": of_two(piq.fsim),
    "gmsd": of_two(piq.gmsd),
    "haarpsi": of_two(piq.haarpsi),
    "mdsi": of_two(piq.mdsi),
    "vsi": of_two(piq.vsi),
    "dss": of_two(piq.dss),
}
