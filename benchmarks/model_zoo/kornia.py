"""kornia: filters, transforms, colours, morphology, features and losses of images."""

import kornia
import torch
from kornia import color, contrib, enhance, feature, filters, losses, morphology
from kornia.geometry import subpix, transform
from torch import Tensor, nn

from benchmarks.model_zoo import Case, Float64Defaults

IMAGES = (2, 3, 24, 32)
KERNEL = torch.ones(3, 3, dtype=torch.float64)
CORNERS = torch.tensor([[[2.0, 2.0], [12, 2], [12, 12], [2, 12]]] * 2, dtype=torch.float64)
FLOW = torch.linspace(-1, 1, 2 * 2 * 24 * 32, dtype=torch.float64).reshape(2, 2, 24, 32)
CAMERA = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)


def pairs(*values):
    return torch.tensor([values] * 2, dtype=torch.float64)


def each(*values):
    return torch.tensor(values, dtype=torch.float64)


def conv():
    return nn.Conv2d(3, 3, 3, padding=1)


def of_image(function):
    """A function of an image between 0 and 1, which comes out of a convolution."""
    return Case(
        lambda: Float64Defaults(lambda c, x: function(torch.sigmoid(c(x))), conv()),
        [IMAGES],
        (2, 3),
    )


def of_two(function):
    return Case(
        lambda: Float64Defaults(lambda c, x, y: function(c(x), y), conv()), [IMAGES] * 2, (2, 3)
    )


def classes() -> Tensor:
    return torch.randint(0, 3, (2, 24, 32))


def of_classes(function):
    return Case(
        lambda: Float64Defaults(lambda c, x, y: function(c(x), y), conv()),
        [IMAGES, classes], (2, 3), each=[(2, 3), (1, 2)],
    )  # fmt: skip


FILTERS = {
    "bilateral": lambda x: filters.bilateral_blur(x, (3, 3), 0.1, (1.5, 1.5)),
    "blur_pool": lambda x: filters.blur_pool2d(x, 3),
    "box": lambda x: filters.box_blur(x, (5, 5)),
    "box_separable": lambda x: filters.box_blur(x, (5, 5), separable=True),
    "canny": lambda x: filters.canny(x)[0],
    "edge_aware_blur_pool": lambda x: filters.edge_aware_blur_pool2d(x, 3),
    "fft_conv": lambda x: filters.fft_conv(x, KERNEL[None] / 9),
    "filter2d": lambda x: filters.filter2d(x, KERNEL[None]),
    "gaussian": lambda x: filters.gaussian_blur2d(x, (5, 7), (1.5, 2.0)),
    "guided": lambda x: filters.guided_blur(x, x, 5, 0.1),
    "laplacian": lambda x: filters.laplacian(x, 5),
    "max_blur_pool": lambda x: filters.max_blur_pool2d(x, 3),
    "median": lambda x: filters.median_blur(x, (3, 3)),
    "motion": lambda x: filters.motion_blur(x, 5, 35.0, 0.5),
    "otsu": lambda x: filters.otsu_threshold(x)[0],
    "sobel": filters.sobel,
    "spatial_gradient": filters.spatial_gradient,
    "unsharp": lambda x: filters.unsharp_mask(x, (5, 5), (1.5, 1.5)),
}
MORPHOLOGY = {
    "dilation": lambda x: morphology.dilation(x, KERNEL),
    "dilation_by_convolution": lambda x: morphology.dilation(x, KERNEL, engine="convolution"),
    "erosion": lambda x: morphology.erosion(x, KERNEL),
    "opening": lambda x: morphology.opening(x, KERNEL),
    "closing": lambda x: morphology.closing(x, KERNEL),
    "top_hat": lambda x: morphology.top_hat(x, KERNEL),
    "morphological_gradient": lambda x: morphology.gradient(x, KERNEL),
}
TRANSFORMS = {
    "pyrdown": transform.pyrdown,
    "pyrup": transform.pyrup,
    "pyramid": lambda x: transform.build_pyramid(x, 3),
    "laplacian_pyramid": lambda x: transform.build_laplacian_pyramid(x, 2),
    "center_crop": lambda x: transform.center_crop(x, (10, 12)),
    "crop_and_resize": lambda x: transform.crop_and_resize(x, CORNERS, (8, 9)),
    "hflip": transform.hflip,
    "vflip": transform.vflip,
    "rot180": transform.rot180,
    "resize": lambda x: transform.resize(x, (17, 20)),
    "resize_antialiased": lambda x: transform.resize(x, (12, 16), antialias=True),
    "rescale": lambda x: transform.rescale(x, (0.5, 0.5)),
    "rotate": lambda x: transform.rotate(x, each(30.0, 10.0)),
    "translate": lambda x: transform.translate(x, pairs(3.0, 2.0)),
    "shear": lambda x: transform.shear(x, pairs(0.3, 0.2)),
    "scale": lambda x: transform.scale(x, pairs(0.7, 1.2)),
    "elastic": lambda x: transform.elastic_transform2d(x, FLOW, (5, 5), (2.0, 2.0)),
    "warp_perspective": lambda x: transform.warp_perspective(x, CAMERA + 0.001, (20, 30)),
    "undistort": lambda x: kornia.geometry.calibration.undistort_image(
        x, CAMERA * 10, torch.zeros(2, 4, dtype=torch.float64)
    ),
    "depth_to_normals": lambda x: kornia.geometry.depth.depth_to_normals(x[:, :1] + 1, CAMERA),
    "patches": lambda x: contrib.extract_tensor_patches(x, (6, 6), (6, 6)),
    "distance_transform": lambda x: contrib.distance_transform(x[:, :1]),
}
COLOURS = {
    "gamma": lambda x: enhance.adjust_gamma(x, 0.7),
    "hue": lambda x: enhance.adjust_hue(x, 0.3),
    "saturation": lambda x: enhance.adjust_saturation(x, 1.5),
    "contrast": lambda x: enhance.adjust_contrast_with_mean_subtraction(x, 1.5),
    "histogram": lambda x: enhance.image_histogram2d(x, n_bins=8)[0],
    "integral": enhance.integral_image,
    "normalize_min_max": enhance.normalize_min_max,
    "sharpness": lambda x: enhance.sharpness(x, 0.5),
    "solarize": lambda x: enhance.solarize(x, 0.5),
    "jpeg": lambda x: enhance.jpeg_codec_differentiable(x[:, :, :16], each(50.0, 50.0)),
    "lab": color.rgb_to_lab,
    "hsv": color.rgb_to_hsv,
    "hls": color.rgb_to_hls,
    "luv": color.rgb_to_luv,
    "xyz": color.rgb_to_xyz,
    "ycbcr": color.rgb_to_ycbcr,
    "sepia": color.sepia,
    "clahe": lambda x: enhance.equalize_clahe(x, grid_size=(2, 2)),
}
FEATURES = {
    "harris": feature.harris_response,
    "gftt": feature.gftt_response,
    "hessian": feature.hessian_response,
    "soft_argmax": subpix.spatial_soft_argmax2d,
    "dsnt": lambda x: subpix.spatial_expectation2d(subpix.spatial_softmax2d(x)),
    "nms": lambda x: subpix.nms2d(x, (3, 3)),
    "conv_soft_argmax": lambda x: subpix.conv_soft_argmax2d(x, (3, 3)),
}
OF_TWO = {
    "charbonnier": losses.charbonnier_loss,
    "welsch": losses.welsch_loss,
    "js_divergence": lambda a, b: losses.js_div_loss_2d(a.softmax(1), b.softmax(1)),
    "total_variation": lambda a, b: losses.total_variation(a - b),
    "depth_smoothness": lambda a, b: losses.inverse_depth_smoothness_loss(a[:, :1], b),
    "ssim": lambda a, b: losses.ssim_loss(a, b, 5),
    "ms_ssim_l1": lambda a, b: losses.MS_SSIMLoss(sigmas=[0.5, 1.0], data_range=1.0)(a, b),
    "psnr": lambda a, b: losses.psnr_loss(a, b, 1.0),
    "mutual_information": lambda a, b: losses.mutual_information_loss_2d(
        a[:, 0], b[:, 0], num_bins=8
    ),
}
OF_CLASSES = {
    "dice": losses.dice_loss,
    "tversky": lambda a, b: losses.tversky_loss(a, b, 0.5, 0.5),
    "focal": lambda a, b: losses.focal_loss(a, b, 0.5, 2.0, "mean"),
    "lovasz_softmax": losses.lovasz_softmax_loss,
    "lovasz_hinge": lambda a, b: losses.lovasz_hinge_loss(a[:, :1], (b > 0).long()),
    "hausdorff": lambda a, b: losses.HausdorffERLoss()(a, b[:, None]),
}
CASES = {
    **{n: of_image(f) for n, f in (FILTERS | MORPHOLOGY | TRANSFORMS).items()},
    **{n: of_image(f) for n, f in (COLOURS | FEATURES).items()},
    **{f"{n}_loss": of_two(f) for n, f in OF_TWO.items()},
    **{f"{n}_loss": of_classes(f) for n, f in OF_CLASSES.items()},
}
