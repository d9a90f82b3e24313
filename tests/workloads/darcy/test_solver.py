import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

from lightning_modules.darcy.solver import binary_coefficient, gaussian_random_field, solve_darcy


def manufactured(resolution: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Smooth a, f = -div(a grad u) and u = sin(pi x) sin(2 pi y), on the nodes."""
    x, y = np.meshgrid(*2 * [np.linspace(0.0, 1.0, resolution)], indexing="ij")
    pi, two_pi = np.pi, 2 * np.pi
    a = 2 + np.sin(pi * x) * np.cos(pi * y)
    a_x, a_y = pi * np.cos(pi * x) * np.cos(pi * y), -pi * np.sin(pi * x) * np.sin(pi * y)
    u = np.sin(pi * x) * np.sin(two_pi * y)
    u_x, u_y = (
        pi * np.cos(pi * x) * np.sin(two_pi * y),
        two_pi * np.sin(pi * x) * np.cos(two_pi * y),
    )
    return a, 5 * pi**2 * a * u - a_x * u_x - a_y * u_y, u


def test_second_order_convergence():
    errors = []
    for resolution in (33, 65, 129):
        a, f, u = manufactured(resolution)
        errors.append(np.abs(solve_darcy(a[None], f)[0] - u).max())
    rates = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(rates, 2.0, atol=0.05)


def test_agrees_with_a_direct_solver():
    resolution = 12
    a = binary_coefficient(1, resolution, np.random.default_rng(0))[0]
    spacing = 1 / (resolution - 1)
    interior = [(i, j) for i in range(1, resolution - 1) for j in range(1, resolution - 1)]
    number = {node: k for k, node in enumerate(interior)}
    matrix = scipy.sparse.lil_array((len(interior), len(interior)))
    for (i, j), k in number.items():
        for neighbour in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            face = (a[i, j] + a[neighbour]) / 2 / spacing**2
            matrix[k, k] += face
            if neighbour in number:
                matrix[k, number[neighbour]] = -face
    direct = scipy.sparse.linalg.spsolve(matrix.tocsr(), np.ones(len(interior)))
    ours = solve_darcy(a[None], tolerance=1e-12)[0, 1:-1, 1:-1].ravel()
    np.testing.assert_allclose(ours, direct, rtol=1e-10)


@pytest.mark.parametrize("resolution", [16, 31])
def test_both_sine_transforms_agree(resolution):
    a = binary_coefficient(3, resolution, np.random.default_rng(1))
    fft, matrix = (
        solve_darcy(a, tolerance=1e-12, sine_transform=kind) for kind in ("fft", "matrix")
    )
    np.testing.assert_allclose(fft, matrix, rtol=1e-9, atol=1e-14)


def test_samples_of_a_batch_do_not_influence_each_other():
    a = binary_coefficient(3, 24, np.random.default_rng(2))
    a[1] = 1.0  # the preconditioner is exact here: one iteration, then this sample waits
    alone = np.concatenate([solve_darcy(sample[None]) for sample in a])
    np.testing.assert_allclose(solve_darcy(a), alone, rtol=1e-12, atol=1e-15)


def test_zero_source_gives_zero():
    assert not solve_darcy(np.ones((2, 8, 8)), 0.0).any()


def test_random_field_has_the_covariance_of_its_series():
    resolution, alpha, tau = 17, 2.0, 3.0
    rng = np.random.default_rng(3)
    fields = gaussian_random_field(20_000, resolution, rng, alpha=alpha, tau=tau)
    modes = np.arange(resolution)
    nodes = np.linspace(0, 1, resolution)
    basis = np.where(modes > 0, np.sqrt(2), 1) * np.cos(np.pi * np.outer(nodes, modes))
    power = tau ** (2 * alpha - 2) * (np.pi**2 * (modes[:, None] ** 2 + modes**2) + tau**2) ** (
        -alpha
    )
    power[0, 0] = 0.0
    variance = basis**2 @ power @ (basis**2).T
    np.testing.assert_allclose(fields.var(axis=0), variance, rtol=0.06)
    np.testing.assert_allclose(fields.mean(axis=0), 0.0, atol=0.02)


def test_coefficient_has_two_equally_likely_phases():
    a = binary_coefficient(200, 32, np.random.default_rng(4))
    assert set(np.unique(a)) == {3.0, 12.0}
    assert abs((a == 12.0).mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("a", "message"),
    [
        (np.ones((8, 8)), r"shape \(samples, nodes, nodes\); got \(8, 8\)"),
        (np.ones((1, 2, 2)), "at least 3 nodes a side.*got 2"),
        (np.zeros((1, 8, 8)), "positive at every node; got a minimum of 0"),
        (np.full((1, 8, 8), np.nan), "finite"),
    ],
)
def test_refuses_bad_coefficients(a, message):
    with pytest.raises(ValueError, match=message):
        solve_darcy(a)


def test_says_so_when_not_converged():
    a = binary_coefficient(2, 32, np.random.default_rng(5))
    with pytest.raises(RuntimeError, match=r"at most 1e-08.*after 3 iterations. Raise"):
        solve_darcy(a, max_iterations=3)
