"""ptwt: wavelet transforms, there and back."""

import ptwt
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import Apply, Case

WIDTHS = torch.arange(1.0, 5, dtype=torch.float64).numpy()


def of(conv, function, shape, dims):
    """A transform of what a convolution gives."""
    return Case(lambda: Apply(lambda c, x: function(c(x)), conv(1, 1, 3, padding=1)), [shape], dims)


def signal(function):
    return of(nn.Conv1d, function, (2, 1, 64), (2,))


def image(function):
    return of(nn.Conv2d, function, (1, 1, 32, 32), (2, 3))


def shrunk(x):
    """Denoised by a threshold on the details."""
    mean, *details = ptwt.wavedec2(x, "haar", level=2)
    details = [tuple(F.softshrink(d, 0.1) for d in level) for level in details]
    return ptwt.waverec2([mean, *details], "haar")


CASES = {
    "wavedec": signal(lambda x: ptwt.waverec(ptwt.wavedec(x, "db3", level=2), "db3")),
    "wavedec2": image(lambda x: ptwt.waverec2(ptwt.wavedec2(x * 2, "db2", level=2), "db2")),
    "fswavedec2": image(lambda x: ptwt.fswaverec2(ptwt.fswavedec2(x, "db2", level=1), "db2")),
    "shrinkage": image(shrunk),
    "wavedec3": of(nn.Conv3d,
        lambda x: ptwt.waverec3(ptwt.wavedec3(x[:, 0], "haar", level=1), "haar"),
        (1, 1, 16, 16, 16), (2, 3)),
    "swt": signal(lambda x: ptwt.iswt(ptwt.swt(x, "haar", level=2), "haar")),
    "cwt": signal(lambda x: ptwt.cwt(x, WIDTHS, "mexh")[0]),
}  # fmt: skip
