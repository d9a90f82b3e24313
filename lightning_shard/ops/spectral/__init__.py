"""Rules for Fourier transforms."""

from lightning_shard.ops.spectral import fft as fft
from lightning_shard.ops.spectral import frames as frames
from lightning_shard.ops.spectral import hermitian as hermitian
