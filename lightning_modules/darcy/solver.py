"""Samples of the Darcy problem -div(a grad u) = f on the unit square, u = 0 on its boundary.

Everything is dimensionless and lives on N x N nodes, boundary included, spacing h = 1 / (N - 1).
The one idea: the coefficient has a contrast of 4, so conjugate gradients preconditioned with the
constant Laplacian (inverted by two sine transforms) need about 25 iterations at every resolution.

Shapes: B samples, N nodes a side, n = N - 2 interior nodes a side.

Source: Li et al., "Fourier Neural Operator for Parametric Partial Differential Equations",
appendix A.3 (https://arxiv.org/abs/2010.08895): field with alpha = 2, tau = 3; a is 3 or 12.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.fft import dctn, dstn
from threadpoolctl import threadpool_limits

Array = NDArray[np.float64]
SineTransform = Literal["auto", "fft", "matrix"]


class ConvergenceError(RuntimeError):
    """An iteration did not reach its tolerance."""


def gaussian_random_field(
    num_samples: int,
    resolution: int,
    rng: np.random.Generator,
    *,
    alpha: float = 2.0,
    tau: float = 3.0,
) -> Array:
    """Draw zero-mean Gaussian fields with covariance (-Laplacian + tau^2)^-alpha.

    The Laplacian has zero normal derivative at the boundary, so its eigenfunctions are products of
    cosines, and a type-I DCT evaluates their sum on the nodes.

    Args:
        num_samples: Number B of fields.
        resolution: Nodes N a side, boundary included.
        rng: Source of the random numbers.
        alpha: Smoothness; larger is smoother.
        tau: Inverse correlation length, in units of 1 / side.

    Returns:
        The fields, (B, N, N).
    """
    _require_resolution(resolution)
    modes = np.arange(resolution)
    wavenumber2 = np.pi**2 * (modes[:, None] ** 2 + modes**2)
    amplitude = tau ** (alpha - 1) * (wavenumber2 + tau**2) ** (-alpha / 2)
    amplitude[0, 0] = 0.0  # no constant part: both values of the coefficient are equally likely
    # sqrt(2) cos(k pi x) has norm 1; DCT-I itself doubles every term but the first and the last
    weight = np.full(resolution, np.sqrt(0.5))
    weight[[0, -1]] = 1.0, np.sqrt(2.0)
    series = amplitude * np.outer(weight, weight)
    coefficients = series * rng.standard_normal((num_samples, *series.shape))
    return np.asarray(dctn(coefficients, type=1, axes=(1, 2)))


def binary_coefficient(
    num_samples: int,
    resolution: int,
    rng: np.random.Generator,
    *,
    low: float = 3.0,
    high: float = 12.0,
) -> Array:
    """Draw two-phase coefficients: `high` where a Gaussian random field is positive, else `low`.

    Args:
        num_samples: Number B of coefficients.
        resolution: Nodes N a side, boundary included.
        rng: Source of the random numbers.
        low: Permeability of the phase where the field is negative.
        high: Permeability of the phase where the field is positive.

    Returns:
        The coefficients, (B, N, N).
    """
    return np.where(gaussian_random_field(num_samples, resolution, rng) >= 0.0, high, low)


# Of small matrices: threads win nothing, and where other programs use the cores they wait for each
# other for many times as long as the products take.
@threadpool_limits.wrap(limits=1, user_api="blas")
def solve_darcy(
    a: ArrayLike,
    f: ArrayLike = 1.0,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 200,
    sine_transform: SineTransform = "auto",
) -> Array:
    """Solve -div(a grad u) = f with u = 0 on the boundary, for a batch of coefficients.

    Second-order five-point scheme with arithmetic means of `a` on the faces between nodes.

    Args:
        a: Coefficient on the nodes, positive, (B, N, N).
        f: Source term on the nodes, anything that broadcasts to (B, N, N).
        tolerance: Largest residual of any sample, relative to the norm of its `f`.
        max_iterations: Iterations after which to give up.
        sine_transform: The way to apply the sine transform. "auto" takes the FFT where its length
            has small factors only, and a product with a sine matrix otherwise.

    Returns:
        The solution on the nodes, (B, N, N), zero on the boundary.

    Raises:
        ValueError: If `a` is not a batch of positive square fields.
        ConvergenceError: If a sample has not converged after `max_iterations`.
    """
    a = np.asarray(a, dtype=np.float64)
    _require_coefficient(a)
    apply_inverse = _inverse_laplacian(a.shape[-1], sine_transform)
    rhs = np.broadcast_to(np.asarray(f, dtype=np.float64), a.shape)[:, 1:-1, 1:-1]
    target = tolerance * np.sqrt(_dot(rhs, rhs))

    u, residual = np.zeros(rhs.shape), rhs.copy()
    direction = preconditioned = apply_inverse(residual)
    rho = _dot(residual, preconditioned)
    for _ in range(max_iterations):
        active = np.sqrt(_dot(residual, residual)) > target
        if not active.any():
            return np.pad(u, ((0, 0), (1, 1), (1, 1)))
        image = _apply_operator(a, direction)
        # a finished sample stands still: 0 / 1 instead of 0 / 0
        step = np.where(active, rho, 0.0) / np.where(active, _dot(direction, image), 1.0)
        u += step[:, None, None] * direction
        residual -= step[:, None, None] * image
        preconditioned = apply_inverse(residual)
        rho_next = _dot(residual, preconditioned)
        ratio = np.where(active, rho_next, 0.0) / np.where(active, rho, 1.0)
        direction = preconditioned + ratio[:, None, None] * direction
        rho = np.where(active, rho_next, rho)
    worst = np.max(np.sqrt(_dot(residual, residual) / np.maximum(_dot(rhs, rhs), 1e-300)))
    raise ConvergenceError(
        f"solve_darcy needs a relative residual of at most {tolerance:g} in every sample; got "
        f"{worst:g} after {max_iterations} iterations. Raise max_iterations or tolerance."
    )


def _apply_operator(a: Array, u: Array) -> Array:
    """-div(a grad u) on the interior: (B, N, N), (B, n, n) -> (B, n, n)."""
    spacing2 = 1.0 / (a.shape[-1] - 1) ** 2
    padded = np.pad(u, ((0, 0), (1, 1), (1, 1)))
    face_rows = (a[:, :-1, 1:-1] + a[:, 1:, 1:-1]) / 2
    face_cols = (a[:, 1:-1, :-1] + a[:, 1:-1, 1:]) / 2
    flux_rows = face_rows * np.diff(padded[:, :, 1:-1], axis=1)
    flux_cols = face_cols * np.diff(padded[:, 1:-1, :], axis=2)
    return -(np.diff(flux_rows, axis=1) + np.diff(flux_cols, axis=2)) / spacing2


def _inverse_laplacian(resolution: int, sine_transform: SineTransform) -> Callable[[Array], Array]:
    """Inverse of the five-point Laplacian (a = 1), diagonal under the orthonormal DST-I."""
    k = np.arange(1, resolution - 1)
    eigenvalue = (2 - 2 * np.cos(np.pi * k / (resolution - 1))) * (resolution - 1) ** 2
    eigenvalues = eigenvalue[:, None] + eigenvalue
    if sine_transform == "auto":
        sine_transform = "fft" if _fft_is_faster(resolution) else "matrix"
    if sine_transform == "fft":

        def transform(v: Array) -> Array:
            return np.asarray(dstn(v, type=1, axes=(1, 2), norm="ortho"))
    else:
        sine = np.sin(np.pi * np.outer(k, k) / (resolution - 1)) * np.sqrt(2 / (resolution - 1))

        def transform(v: Array) -> Array:
            return sine @ v @ sine

    return lambda v: transform(transform(v) / eigenvalues)


def _fft_is_faster(resolution: int) -> bool:
    """Return True if DST-I by FFT, of length 2 (N - 1), beats a product with an n x n matrix.

    Measured on one CPU core: the matrix wins below about 100 nodes, and by a factor 2 to 3 where
    the length has a large prime factor (N = 128: 254 = 2 * 127).
    """
    length = 2 * (resolution - 1)
    for factor in (2, 3, 5, 7, 11, 13, 17):
        while length % factor == 0:
            length //= factor
    return resolution > 100 and length == 1


def _dot(u: Array, v: Array) -> Array:
    """Inner product of each sample: (B, n, n), (B, n, n) -> (B,)."""
    return np.einsum("bij,bij->b", u, v)


def _require_resolution(resolution: int) -> None:
    if resolution < 3:
        raise ValueError(
            f"Darcy needs at least 3 nodes a side, two of them on the boundary; got {resolution}. "
            "Use a larger resolution."
        )


def _require_coefficient(a: Array) -> None:
    if a.ndim != 3 or a.shape[1] != a.shape[2]:
        raise ValueError(
            f"a needs shape (samples, nodes, nodes); got {a.shape}. Add the batch dim, or crop."
        )
    _require_resolution(a.shape[-1])
    if not (np.isfinite(a).all() and a.min(initial=np.inf) > 0):
        raise ValueError(
            f"a needs to be finite and positive at every node; got a minimum of {a.min():g}. "
            "Shift or threshold the field before solving."
        )
