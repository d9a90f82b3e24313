"""Wrong calls, drawn at random: torch's error on every rank, or a refusal by name; never a hang."""

import gc
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard
from lightning_shard import UnsupportedOperationError, use_exact_random
from tests.parity import assert_same, mesh_of

SHAPES = ((5,), (4, 6), (1, 7), (2, 3, 5), (3, 4, 6, 5), (2, 4, 1, 3), (2, 2, 3, 4, 5))
NUMBERS = (-3, -1, 0, 1, 2, 3, 4, 7, 100)
DTYPES = (*[torch.float64] * 3, torch.int64, torch.bool, torch.complex128)
BARE = """
    T mT H mH real imag argmax argmin std var mean median mode sum prod cov corrcoef aminmax histc
    trace tril triu det inverse sqrt floor sgn conj_physical logical_not bitwise_not neg sigmoid
    angle signbit frac lgamma logdet t adjoint nonzero tolist item diag ravel sort unique isfinite
    nan_to_num int half square reciprocal exp2 relu logit digamma erf round abs sign tanh all any
""".split()  # attributes, and methods that need no argument
ODD = (None, "a", 0.5, -1, 0, 2, (), (1,), (0, 0), (2, 2), (1, 2, 3), [], [-9], True)


class Draw:
    """Arguments drawn from the same seed for every rank and for one process."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def n(self) -> int:
        return self.random.choice(NUMBERS)

    def dim(self) -> Any:
        return self.random.choice((-6, -5, -2, -1, 0, 1, 1, 2, 3, 5, 7))

    def dims(self) -> Any:
        return self.random.choice(((0, 1), (2, 2), (-1, 1), (0, 9), (1, 0), (), (0,), (3, -1)))

    def odd(self) -> Any:
        return self.random.choice(ODD)

    def any(self) -> Any:
        return self.random.choice((self.n, self.dim, self.dims, self.odd))()

    def ints(self, count: int) -> list[int]:
        return [self.n() for _ in range(self.random.choice((count, count, count - 1, count + 1)))]

    def plain(self, *shape: int) -> Tensor:
        """A plain tensor of some dtype, of `shape` or another one."""
        shape = self.random.choice((shape, shape, (3,), (2, 2), ()))
        dtype = self.random.choice((torch.float64, torch.float64, torch.float32, torch.int64))
        return torch.ones(shape, dtype=dtype)

    def index(self) -> Tensor:
        return self.random.choice((
            torch.tensor([0.5]), torch.tensor([0, 1]), torch.tensor([0, 99]), torch.tensor([-1]),
            torch.tensor([[0, 1]]), torch.tensor(0), torch.tensor([], dtype=torch.long),
        ))  # fmt: skip


CALLS: tuple[Callable[[Any, Draw], Any], ...] = (
    lambda x, d: torch.renorm(x, d.n(), d.dim(), d.n()),
    lambda x, d: torch.fft.fft(x, d.n(), d.dim()),
    lambda x, d: torch.fft.rfft(x, d.any(), d.any()),
    lambda x, d: torch.fft.irfft(x, d.n(), d.dim()),
    lambda x, d: torch.fft.fftn(x, d.any(), d.any()),
    lambda x, d: torch.fft.rfftn(x, dim=d.any()),
    lambda x, d: torch.fft.hfft(x, d.n(), d.dim()),
    lambda x, d: torch.fft.fftshift(x, d.any()),
    lambda x, d: x.unsqueeze(d.any()),
    lambda x, d: x.squeeze(d.any()),
    lambda x, d: x.flip(d.any()),
    lambda x, d: x.roll(d.any(), d.any()),
    lambda x, d: x.diff(d.n(), d.dim()),
    lambda x, d: x.chunk(d.any(), d.dim()),
    lambda x, d: x.split(d.any(), d.dim()),
    lambda x, d: x.tensor_split(d.any(), d.dim()),
    lambda x, d: x.repeat(*d.ints(x.ndim)),
    lambda x, d: x.expand(*d.ints(x.ndim)),
    lambda x, d: x.view(d.ints(2)),
    lambda x, d: x.reshape(d.any()),
    lambda x, d: x.permute(d.any()),
    lambda x, d: x.transpose(d.dim(), d.dim()),
    lambda x, d: x.movedim(d.any(), d.any()),
    lambda x, d: x.flatten(d.dim(), d.dim()),
    lambda x, d: x.unflatten(d.dim(), d.any()),
    lambda x, d: x.narrow(d.dim(), d.n(), d.n()),
    lambda x, d: x.select(d.dim(), d.n()),
    lambda x, d: x.unfold(d.dim(), d.n(), d.n()),
    lambda x, d: x[d.any()],
    lambda x, d: x[d.n() : d.n()],
    lambda x, d: x[..., d.n(), None, d.n()],
    lambda x, d: x.index_select(d.dim(), d.index()),
    lambda x, d: torch.gather(x, d.dim(), d.index()),
    lambda x, d: torch.take_along_dim(x, d.index(), d.dim()),
    lambda x, d: x.scatter(d.dim(), d.index(), d.n()),
    lambda x, d: x.index_add(d.dim(), d.index(), d.plain(2)),
    lambda x, d: x.sum(d.any()),
    lambda x, d: x.mean(d.dims(), keepdim=d.odd()),
    lambda x, d: x.std(d.any()),
    lambda x, d: x.amax(d.any()),
    lambda x, d: x.argmax(d.any()),
    lambda x, d: x.max(d.any()),
    lambda x, d: x.cumsum(d.any()),
    lambda x, d: x.sort(d.any()),
    lambda x, d: x.topk(d.n(), d.dim()),
    lambda x, d: x.kthvalue(d.n(), d.dim()),
    lambda x, d: x.median(d.any()),
    lambda x, d: x.quantile(d.any(), d.dim()),
    lambda x, d: x.softmax(d.any()),
    lambda x, d: x.log_softmax(d.dim()),
    lambda x, d: x.logsumexp(d.any()),
    lambda x, d: torch.linalg.vector_norm(x, d.any(), d.any()),
    lambda x, d: torch.linalg.norm(x, d.odd(), d.any()),
    lambda x, d: torch.linalg.matrix_norm(x, d.any()),
    lambda x, d: torch.linalg.det(x),
    lambda x, d: torch.linalg.cross(x, x, dim=d.dim()),
    lambda x, d: torch.diagonal(x, d.n(), d.dim(), d.dim()),
    lambda x, d: torch.trace(x),
    lambda x, d: torch.cat([x, x.transpose(0, -1)], d.dim()),
    lambda x, d: torch.cat([x, d.plain(3)], d.any()),
    lambda x, d: torch.stack([x, x], d.any()),
    lambda x, d: torch.stack([x, x[:1]], d.dim()),
    lambda x, d: torch.matmul(x, d.plain(x.shape[-1], 2)),
    lambda x, d: torch.bmm(x, x),
    lambda x, d: torch.mm(x, d.plain(6, 2)),
    lambda x, d: torch.einsum(d.random.choice(("ij,jk", "ij->ii", "a...->z", "ij->ji")), x),
    lambda x, d: torch.tensordot(x, x, d.n()),
    lambda x, d: F.linear(x, d.plain(2, x.shape[-1])),
    lambda x, d: F.conv1d(x, d.plain(2, 3, 3), None, d.n(), d.n(), d.n()),
    lambda x, d: F.conv2d(x, d.plain(2, 4, 3, 3), None, d.n(), d.any(), d.n(), d.n()),
    lambda x, d: F.conv2d(x, d.plain(2, 4, 9, 9), stride=d.any()),
    lambda x, d: F.conv_transpose2d(x, d.plain(4, 2, 3, 3), None, d.n(), d.n(), d.n()),
    lambda x, d: F.max_pool2d(x, d.any(), d.any(), d.n()),
    lambda x, d: F.avg_pool2d(x, d.any(), d.n(), d.n()),
    lambda x, d: F.adaptive_avg_pool2d(x, d.any()),
    lambda x, d: F.adaptive_max_pool2d(x, d.any()),
    lambda x, d: F.pad(x, d.any(), d.random.choice(("constant", "reflect", "circular", "no"))),
    lambda x, d: F.pad(x, d.ints(4), d.random.choice(("constant", "reflect", "replicate"))),
    lambda x, d: F.interpolate(x, d.any(), mode=d.random.choice(("nearest", "bilinear", "x"))),
    lambda x, d: F.interpolate(x, scale_factor=d.any()),
    lambda x, d: F.pixel_shuffle(x, d.n()),
    lambda x, d: F.pixel_unshuffle(x, d.n()),
    lambda x, d: F.unfold(x, d.any(), padding=d.n()),
    lambda x, d: F.grid_sample(x, d.plain(3, 2, 2, 2)),
    lambda x, d: F.layer_norm(x, d.any()),
    lambda x, d: F.group_norm(x, d.n()),
    lambda x, d: F.batch_norm(x, d.plain(x.shape[0]), d.plain(4), training=True),
    lambda x, d: F.instance_norm(x),
    lambda x, d: F.normalize(x, dim=d.any()),
    lambda x, d: F.glu(x, d.dim()),
    lambda x, d: F.prelu(x, d.plain(3)),
    lambda x, d: F.mse_loss(x, d.plain(3), reduction=d.random.choice(("mean", "none", "x"))),
    lambda x, d: F.cross_entropy(x, d.index()),
    lambda x, d: F.nll_loss(x, d.plain(3)),
    lambda x, d: F.one_hot(x.long(), d.n()),
    lambda x, d: F.embedding(x.long(), d.plain(3, 2)),
    lambda x, d: F.scaled_dot_product_attention(x, x, d.plain(2, 3, 5)),
    lambda x, d: F.dropout(x, d.any()),
    lambda x, d: torch.where(x > 0, x, d.plain(3)),
    lambda x, d: torch.where(x, x, x),
    lambda x, d: x + d.plain(3),
    lambda x, d: torch.add(x, d.odd()),
    lambda x, d: x.clamp(),
    lambda x, d: x**d.odd(),
    lambda x, d: x == d.odd(),
    lambda x, d: x & x,
    lambda x, d: x.masked_fill(d.plain(3) > 0, d.odd()),
    lambda x, d: torch.bitwise_and(x, 1),
    lambda x, d: x.type(d.odd()),
    lambda x, d: x.to(d.odd()),
    lambda x, d: float(x),
    lambda x, d: x.item(),
    lambda x, d: len(x.select(0, 0)),
    lambda x, d: x.stride(d.dim()),
    lambda x, d: x.trapezoid() if d.n() else torch.trapezoid(x, dim=d.dim()),
    lambda x, d: torch.gradient(x, spacing=d.any(), dim=d.any()),
    lambda x, d: torch.cov(x, correction=d.n()),
    lambda x, d: torch.bucketize(x, d.plain(2, 2)),
    lambda x, d: torch.histc(x, d.n(), d.n(), d.n()),
    lambda x, d: torch.cdist(x, d.plain(3, 2)),
    lambda x, d: torch.meshgrid(x, x, indexing=d.odd()),
    lambda x, d: x.repeat_interleave(d.n(), d.dim()),
    lambda x, d: torch.rot90(x, d.any(), d.dims()),
    lambda x, d: torch.tril(x, d.odd()),
    lambda x, d: x.swapaxes(d.dim(), d.dim()),
    lambda x, d: torch.relu(x, x),
    lambda x, d: torch.maximum(x, x, out=d.plain(3)),
    lambda x, d: torch.sum(x, d.dim(), out=x),
    lambda x, d: torch.addmm(x, x, d.plain(6, 6)),
    lambda x, d: x.sum(wrong=1),
    lambda x, d: x.__setitem__((d.any(), d.n()), d.plain(3)),
    lambda x, d: x.add_(d.plain(9, *x.shape)),
    lambda x, d: x.index_fill_(d.dim(), d.index(), 0.5),
)  # fmt: skip


def outcome(call: Callable[[Any, Draw], Any], x: Tensor, seed: int) -> tuple[str, Any]:
    """The class of the error, or "" and what was returned."""
    try:
        result = call(x, Draw(seed))
        return "", result
    except Exception as error:  # of any class: it is compared below
        return type(error).__name__, str(error)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, Tensor):
        return found == expected or (found is not None and found is expected)
    found = lightning_shard.gather(found) if isinstance(found, Tensor) else found
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    single = found.dtype in (torch.float32, torch.complex64)
    return torch.allclose(found, expected, atol=1e-6 if single else 1e-8, equal_nan=True)


def fault_of(seed: int, mesh: DeviceMesh) -> tuple[str, str]:
    """("asymmetric", "accepted", "class", "value" or ""; the call in words)."""
    draw = Random(seed)
    call = draw.choice(CALLS)
    shape = draw.choice([s for s in SHAPES if len(s) >= mesh.ndim])
    dims, dtype = draw.sample(range(len(shape)), mesh.ndim), draw.choice(DTYPES)
    x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x if dtype == torch.float64 else (4 * x - 1).to(dtype)
    told = f"line {call.__code__.co_firstlineno}, {seed=}, {shape=}, {dims=}, {dtype}"
    return compared(call, seed, x, lightning_shard.shard(x.clone(), mesh, dims), told)


def compared(
    call: Callable[[Any, Draw], Any], seed: int, x: Tensor, split: Tensor, told: str
) -> tuple[str, str]:
    torch.manual_seed(seed)
    error, expected = outcome(call, x.clone(), seed)
    torch.manual_seed(seed)
    with use_exact_random():
        refused, found = outcome(call, split, seed)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, refused)
    told += (
        f": torch {error} ({expected if error else 'ok'}), "
        f"ranks {ranks} ({found if refused else 'ok'})"
    )
    if len(set(ranks)) > 1:
        return "asymmetric", told
    if error and not refused:
        return "accepted", told
    if error and refused not in (error, UnsupportedOperationError.__name__):
        return "class", told
    if not error and refused not in ("", UnsupportedOperationError.__name__):
        return "class", told
    if not error and not refused and not same(found, expected):
        return "value", told
    return "", told


def check(seeds: range, mesh: DeviceMesh) -> None:
    expect_none([fault_of(seed, mesh) for seed in seeds])


def expect_none(faults: list[tuple[str, str]]) -> None:
    wrong = [f"{kind}: {told}" for kind, told in faults if kind]
    assert not wrong, f"{len(wrong)} of {len(faults)} calls:\n" + "\n".join(wrong)


@pytest.mark.spmd(2)
def test_two_ranks():
    check(range(60), mesh_of(2))


@pytest.mark.slow
@pytest.mark.spmd(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128])
def test_without_arguments(dtype):
    """Of numbers of which not every kernel computes something, though meta tensors pass."""
    faults = []
    for shape, name in itertools.product([(5,), (4, 6), (2, 3, 4)], BARE):
        x = (4 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1).to(dtype)

        def call(x: Any, draw: Draw, name: str = name) -> Any:
            attribute = getattr(x, name)
            return attribute() if callable(attribute) else attribute

        split = lightning_shard.shard(x.clone(), mesh_of(2), len(shape) - 1)
        faults.append(compared(call, 0, x, split, f"{name} of {shape}"))
    expect_none(faults)


@pytest.mark.spmd(2)
def test_rows_to_write_of_other_shapes_and_dtypes():
    """Meta tensors take some of these; and an index without dims, which is one row."""
    sources = [torch.ones(shape) for shape in ((2,), (1, 2), (1, 3), (2, 7), (1, 1), ())]
    faults = []
    for name, dim, source, index in itertools.product(
        ("index_add", "index_copy", "index_fill"),
        (0, 1),
        (*sources, *(source.double() for source in sources)),
        (torch.tensor([0, 0]), torch.tensor(0)),
    ):
        x = torch.rand(1, 7, dtype=torch.float64)
        split = lightning_shard.shard(x.clone(), mesh_of(2), 1)

        def call(x: Any, draw: Draw, given: Any = (name, dim, index, source)) -> Any:
            return getattr(x, given[0])(*given[1:])

        faults.append(compared(call, 0, x, split, f"{name} {dim} {tuple(index.shape)} {source}"))
    expect_none(faults)


@pytest.mark.spmd(4)
def test_two_by_two():
    check(range(60, 100), mesh_of(2, 2))


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_many_on_two_ranks():
    check(range(1000, 2000), mesh_of(2))


@pytest.mark.slow
@pytest.mark.spmd(4)
def test_many_on_two_by_two():
    check(range(2000, 3000), mesh_of(2, 2))


@pytest.mark.slow
@pytest.mark.spmd(3)
def test_floats_of_eight_bits_fail_on_all_ranks():
    """The third rank has no rows; a kernel that is missing is no error there."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        whole = torch.ones(2, 2).to(dtype)
        x = lightning_shard.shard(whole, mesh_of(3), 0)
        for run in (torch.sum, torch.amax, lambda x: x.cumsum(0), lambda x: x.softmax(0)):
            with pytest.raises((RuntimeError, NotImplementedError)) as alone:
                run(whole)
            with pytest.raises(alone.type, match="not implemented for"):
                run(x)


@pytest.mark.spmd(2)
def test_what_meta_tensors_refuse_hides_no_graph_after_a_jvp():
    """An error of torch's kept a guard in a frame: the next collection hid autograd for good."""
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    split = lightning_shard.shard(x, mesh_of(2), 1)

    def middle(t: Tensor) -> Tensor:
        return t.quantile(0.5, 0)

    expected = torch.func.jvp(middle, (x,), (x.cos(),))
    found = torch.func.jvp(middle, (split,), (split.cos(),))
    for one, other in zip(found, expected, strict=True):
        assert_same(lightning_shard.gather(one), other)
    gc.collect(1)
    assert (x.requires_grad_() * 2).requires_grad
