from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_shard
from lightning_shard.domain.errors import UnsupportedOperationError
from tests import OLDEST
from tests.pairs import choose
from tests.parity import assert_double_backward, assert_parity, assert_parity_of_module, mesh_of

IMAGE = (2, 3, 7, 5)
SIZES = {"double": (14, 10), "odd": (17, 6), "smaller": (4, 3), "same": (7, 5), "mixed": (5, 11)}
MODES = {
    "nearest": {},
    "nearest-exact": {},
    "area": {},
    "bilinear": {},
    "bilinear_aligned": {"align_corners": True},
    "bicubic": {},
    "bicubic_aligned": {"align_corners": True},
    "bilinear_smooth": {"antialias": True},
    "bicubic_smooth": {"antialias": True},
    "bilinear_smooth_aligned": {"antialias": True, "align_corners": True},
}
FACTORS = {
    "double": {"scale_factor": 2},
    "third": {"scale_factor": 1 / 3},
    "uneven": {"scale_factor": (1.7, 0.6)},
    "recomputed": {"scale_factor": (1.7, 0.6), "recompute_scale_factor": True},
    "given": {"scale_factor": (2.3, 1.3), "recompute_scale_factor": False},
}


def resize(mode, **options):
    return lambda x: F.interpolate(x, mode=mode.split("_")[0], **MODES[mode], **options)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("mode", "size", "dim"), choose(MODES, SIZES, [0, 2, 3]))
def test_sizes(mode, size, dim):
    assert_parity(resize(mode, size=SIZES[size]), [IMAGE], {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("mode", "factor", "dim"), choose(MODES, FACTORS, [2, 3]))
def test_scale_factors(mode, factor, dim):
    assert_parity(resize(mode, **FACTORS[factor]), [(2, 3, 13, 9)], {0: [dim]}, mesh_of(3))


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    "options",
    [{"scale_factor": 2}, {"size": (32, 12)}, {"scale_factor": 2.1}, {"scale_factor": 3.0}],
    ids=str,
)
def test_rows_that_repeat_on_their_rank(options):
    """Those of 2 and 4 times go through torch's function at once; the others do not."""
    assert_parity(resize("nearest", **options), [(2, 3, 8, 6)], {0: [2]}, mesh_of(2))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("mode", "size"), choose(MODES, SIZES, every=2))
def test_two_by_two(mode, size):
    assert_parity(resize(mode, size=SIZES[size]), [IMAGE], {0: [2, 3]}, mesh_of(2, 2))


@pytest.mark.spmd(4)
@pytest.mark.parametrize(("mode", "output", "extent"), choose(MODES, [1, 2, 3, 7], [1, 2, 3]))
def test_fewer_rows_than_ranks(mode, output, extent):
    assert_parity(resize(mode, size=(output, 4)), [(2, 3, extent, 4)], {0: [2]}, mesh_of(4))


OTHERS = {
    "line": (lambda x: F.interpolate(x, 12, mode="linear"), (2, 3, 7)),
    "line_aligned": (lambda x: F.interpolate(x, 12, mode="linear", align_corners=True), (2, 3, 7)),
    "line_nearest": (lambda x: F.interpolate(x, scale_factor=1.5), (2, 3, 7)),
    "line_area": (lambda x: F.interpolate(x, 3, mode="area"), (2, 3, 7)),
    "volume": (lambda x: F.interpolate(x, (9, 3, 6), mode="trilinear"), (2, 3, 5, 4, 3)),
    "volume_factor": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (2, 3, 5, 4, 3),
    ),
    "volume_nearest": (lambda x: F.interpolate(x, (3, 6, 6)), (2, 3, 5, 4, 3)),
    "volume_area": (lambda x: F.interpolate(x, (3, 6, 2), mode="area"), (2, 3, 5, 4, 3)),
    "curvature": (lambda x: F.interpolate(x.pow(2), 12, mode="linear").pow(2), (2, 3, 7)),
}


@pytest.mark.spmd(3)
@pytest.mark.parametrize("case", OTHERS)
def test_lines_and_volumes(case):
    function, shape = OTHERS[case]
    assert_parity(function, [shape], {0: [2]}, mesh_of(3))


@pytest.mark.spmd(2)
def test_no_samples():
    empty = lightning_shard.shard(torch.zeros(0, 3, 7, 5), mesh_of(2), 2)
    for mode in ("nearest", "bilinear", "area"):
        assert F.interpolate(empty, size=(4, 6), mode=mode).shape == (0, 3, 4, 6)


@pytest.mark.spmd(3)
@pytest.mark.parametrize("mode", choose(MODES, every=3))
def test_single_precision(mode):
    """The weights are rounded as torch rounds them; far from the origin that shows."""
    options = {"dtype": torch.float32}
    function = resize(mode, size=(2100, 3))
    assert_parity(function, [(1, 1, 1500, 3)], {0: [2]}, mesh_of(3), **options)
    assert_parity(
        resize(mode, scale_factor=(0.37, 1)), [(1, 1, 1500, 3)], {0: [2]}, mesh_of(3), **options
    )


@pytest.mark.spmd(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x = torch.randn(IMAGE).to(dtype)
    result = F.interpolate(lightning_shard.shard(x, mesh_of(3), 2), (11, 8), mode="bilinear")
    assert result.dtype == dtype
    expected = F.interpolate(x, (11, 8), mode="bilinear")
    torch.testing.assert_close(lightning_shard.gather(result), expected, rtol=0.02, atol=0.02)


@pytest.mark.spmd(3)
def test_bytes():
    x = torch.randint(0, 255, IMAGE, dtype=torch.uint8)
    result = F.interpolate(lightning_shard.shard(x, mesh_of(3), 2), (11, 8))
    torch.testing.assert_close(lightning_shard.gather(result), F.interpolate(x, (11, 8)))
    with pytest.raises(UnsupportedOperationError, match="uint8"):
        F.interpolate(lightning_shard.shard(x, mesh_of(3), 2), (11, 8), mode="bilinear")


@pytest.mark.spmd(3)
@pytest.mark.parametrize("mode", choose(MODES, every=3))
def test_gaps_are_as_wide_as_in_one_process(mode):
    """A row that is read with a weight of 0 counts, and one that is not read does not."""
    for size in SIZES.values():
        for row in range(7):
            x = torch.rand(1, 1, 7, 5, dtype=torch.float64)
            x[..., row, row % 5] = torch.nan
            found = resize(mode, size=size)(lightning_shard.shard(x, mesh_of(3), 2))
            expected = resize(mode, size=size)(x)
            torch.testing.assert_close(lightning_shard.gather(found), expected, equal_nan=True)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(
    "module", [nn.Upsample(scale_factor=2, mode="bilinear"), nn.UpsamplingNearest2d(9)]
)
def test_module(module):
    assert_parity_of_module(module, IMAGE, [2], mesh_of(3))


@pytest.mark.spmd(3)
@pytest.mark.parametrize("mode", MODES)
def test_double_backward(mode):
    function = resize(mode, size=(4, 8))
    assert_double_backward(function, [IMAGE], {0: [2]}, mesh_of(3))


@pytest.mark.spmd(3)
def test_refusals_are_those_of_torch():
    x = lightning_shard.shard(torch.randn(IMAGE), mesh_of(3), 2)
    with pytest.raises(ValueError, match="align_corners option can only be set"):
        F.interpolate(x, 4, align_corners=True)
    with pytest.raises(NotImplementedError, match="Got 4D input, but linear mode needs 3D input"):
        F.interpolate(x, 4, mode="linear")
    refusal, words = (
        (ValueError, "Anti-alias") if OLDEST else (UnsupportedOperationError, "lanczos")
    )
    with pytest.raises(refusal, match=words):
        F.interpolate(x, 4, mode="lanczos", antialias=True)


@pytest.mark.spmd(3)
@pytest.mark.parametrize(("mode", "size"), choose(MODES, SIZES, every=2))
def test_infinities(mode, size):
    """A weight of 0 must not read one; torch itself reads some rows twice, once with 0."""
    for row, value in enumerate([inf, -inf] * 3):
        x = torch.randn(IMAGE, dtype=torch.float64)
        x[:, :, row, row % 5] = value
        wanted = resize(mode, size=SIZES[size])(x)
        for dim in (2, 3):
            split = lightning_shard.shard(x, mesh_of(3), dim)
            found = lightning_shard.gather(resize(mode, size=SIZES[size])(split))
            assert not (found.isnan() & ~wanted.isnan()).any()
            found = found.where(~wanted.isnan(), nan)
            torch.testing.assert_close(found, wanted, equal_nan=True)
