"""Convolutions: strides, even kernels, dilation, kernels wider than a part."""

import torch.nn.functional as F

SHAPE, ODD = (2, 3, 7, 5), (2, 3, 13, 9)

CASES = {
    "padded": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [SHAPE, (4, 3, 3, 3), (4,)]),
    "stride": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [ODD, (4, 3, 3, 3), (4,)]),
    "even": (lambda x, w: F.conv2d(x, w, None, 2, 0, 2), [ODD, (4, 3, 2, 4)]),
    "same": (lambda x, w: F.conv2d(x, w, padding="same"), [ODD, (4, 3, 3, 5)]),
    "wide": (lambda x, w: F.conv2d(x, w, padding=4), [(2, 3, 5, 4), (4, 3, 7, 7)]),
}
