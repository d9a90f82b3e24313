"""torch-harmonics: transforms and convolutions on the sphere, and its two neural operators."""

import torch
import torch_harmonics as th
from torch_harmonics.examples.models.lsno import LocalSphericalNeuralOperatorNet
from torch_harmonics.examples.models.sfno import SphericalFourierNeuralOperatorNet

from benchmarks.model_zoo import Apply, Case, Float32, row

NET = {"in_chans": 2, "out_chans": 2, "embed_dim": 8, "num_layers": 2, "scale_factor": 2}


def roundtrip(**options):
    return lambda: Apply(
        lambda forward, back, w, x: back(forward(x) * w.weight.reshape(3, 1, 1)),
        th.RealSHT(17, 32, **options), th.InverseRealSHT(17, 32, **options),
        torch.nn.Linear(1, 3),
    )  # fmt: skip


def vector_roundtrip():
    return Apply(
        lambda forward, back, x: back(forward(x)),
        th.RealVectorSHT(17, 32), th.InverseRealVectorSHT(17, 32),
    )  # fmt: skip


CASES = {
    "sht": Case(roundtrip(), [(1, 3, 17, 32)]),
    "sht_legendre_gauss": Case(roundtrip(grid="legendre-gauss"), [(1, 3, 17, 32)]),
    "sht_lobatto": Case(roundtrip(grid="lobatto", lmax=9, mmax=8), [(1, 3, 17, 32)]),
    "vector_sht": Case(vector_roundtrip, [(1, 3, 2, 17, 32)], (3, 4)),
    "disco": row(th.DiscreteContinuousConvS2, 2, 3, (17, 32), (17, 32), [2, 3], on=(1, 2, 17, 32)),
    "disco_down": row(th.DiscreteContinuousConvS2, 2, 3, (17, 32), (9, 16), [3], groups=1,
        on=(1, 2, 17, 32)),
    "disco_up": row(th.DiscreteContinuousConvTransposeS2, 2, 3, (9, 16), (17, 32), [3],
        on=(1, 2, 9, 16)),
    "resample": Case(lambda: Apply(lambda m, w, x: m(w(x)), th.ResampleS2(17, 32, 33, 64),
        torch.nn.Conv2d(2, 2, 1)), [(1, 2, 17, 32)], (2, 3)),
    "sfno": row(SphericalFourierNeuralOperatorNet, img_size=(33, 64), **NET, pos_embed=True,
        on=(1, 2, 33, 64), within=1e-5),
    "sfno_instance_norm": row(SphericalFourierNeuralOperatorNet, img_size=(33, 64), **NET,
        normalization_layer="instance_norm", big_skip=True, activation_function="gelu",
        grid_internal="equiangular", on=(1, 2, 33, 64), within=1e-5),
    "local_sno": row(LocalSphericalNeuralOperatorNet, img_size=(33, 64), **NET, kernel_shape=[2, 2],
        encoder_kernel_shape=[2, 2], on=(1, 2, 33, 64), within=1e-4, wrap=Float32),
}  # fmt: skip
