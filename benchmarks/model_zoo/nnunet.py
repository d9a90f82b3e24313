"""dynamic-network-architectures: the networks that nnU-Net plans."""

from dynamic_network_architectures.architectures.primus import Primus
from dynamic_network_architectures.architectures.unet import (
    PlainConvUNet,
    ResidualEncoderUNet,
    ResidualUNet,
)
from torch import nn

from benchmarks.model_zoo import Case, row

OPTIONS = {
    "conv_bias": True, "norm_op": nn.InstanceNorm3d,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True},
}  # fmt: skip
KERNELS = [[1, 3, 3], [3, 3, 3], [3, 3, 3]]  # as nnU-Net plans for volumes of thick slices
STRIDES = [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
VOLUME = (1, 2, 12, 16, 20)


def planned(kind, blocks, **options):
    return lambda: kind(
        2, 3, [4, 8, 16], nn.Conv3d, KERNELS, STRIDES, blocks, 3, 1, **OPTIONS, **options
    )


FLAT = OPTIONS | {"norm_op": nn.InstanceNorm2d}

CASES = {
    "plain_unet": Case(planned(PlainConvUNet, 1), [VOLUME], (2, 3, 4)),
    "plain_unet_supervised": Case(
        planned(PlainConvUNet, 1, deep_supervision=True), [VOLUME], (2, 3, 4)
    ),
    "plain_unet_2d": row(PlainConvUNet, 2, 3, [4, 8, 16], nn.Conv2d, 3, [1, 2, 2], 1, 3, 1, **FLAT,
        on=(2, 2, 24, 20)),
    "residual_encoder_unet": Case(planned(ResidualEncoderUNet, [1, 2, 2]), [VOLUME], (2, 3, 4)),
    "residual_unet": Case(planned(ResidualUNet, [1, 2, 2]), [VOLUME], (2, 3, 4)),
    "primus": Case(
        lambda: Primus(  # its rotations need an older timm
            2, 24, (4, 4, 4), 3, 2, 2, (16, 12, 8), use_rot_pos_emb=False
        ),
        [(1, 2, 16, 12, 8)], (2, 3, 4),
    ),
}  # fmt: skip
