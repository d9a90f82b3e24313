"""Under autocast a split tensor has the dtype that torch gives the whole, op by op."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import deform_conv2d, roi_align

import lightning_shard
from lightning_shard import DomainTensor
from tests.gpu_autocast import as_on_gpu
from tests.pairs import choose
from tests.parity import mesh_of

SHAPE = (2, 4, 9, 6)
LABELS = torch.zeros(2, 9, 6, dtype=torch.long)


def weights(*shape):
    return torch.sin(torch.arange(float(torch.Size(shape).numel()))).reshape(shape)


def batch_norm(x, training):
    return F.batch_norm(x, torch.zeros(4), torch.ones(4), weights(4), weights(4), training)


def lstm(x):
    torch.manual_seed(0)
    return torch.nn.LSTM(x.shape[2], 3, batch_first=True)(x.float())[0]


def lstm_cell(x):
    torch.manual_seed(0)
    return torch.nn.LSTMCell(x.shape[1], 3)(x.float())[0]


def flat(x):
    return x.flatten(0, 1)


def conv(x):
    return F.conv2d(x, weights(4, 4, 3, 3), padding=1)


def numbers(x):
    """Of rows, split as they are."""
    return (x[0, 0, :, 0].detach().float() * 10).long().abs() % 9


def written_by_mask(x):
    y = x.clone()
    y[x > 0] = x[x > 0] * 2
    return y


def scattered(x, rows):
    return torch.zeros_like(x).scatter_add(2, rows.view(1, 1, 9, 1).expand(x.shape), x)


FUNCTIONS = {
    "conv": conv,
    "conv_transpose": lambda x: F.conv_transpose2d(x, weights(4, 5, 2, 2), stride=2),
    "linear": lambda x: F.linear(x, weights(7, 6)),
    "matmul": lambda x: x @ x.mT,
    "bmm": lambda x: torch.bmm(flat(x), flat(x).mT),
    "mv": lambda x: torch.mv(x.flatten(0, 2), weights(6).to(x.dtype)),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(1), flat(x), flat(x).mT),
    "addmm": lambda x: torch.addmm(torch.ones(5), x.flatten(0, 2), weights(6, 5)),
    "einsum": lambda x: torch.einsum("bchw,oc->bohw", x, weights(3, 4)),
    "bilinear": lambda x: F.bilinear(x, x, weights(3, 6, 6).to(x.dtype)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: F.softmax(x, 2),
    "log_softmax": lambda x: F.log_softmax(x, 2),
    "logsumexp": lambda x: torch.logsumexp(x, 2),
    "batch_norm": lambda x: batch_norm(x, True),
    "batch_norm in eval mode": lambda x: batch_norm(x, False),
    "instance_norm": F.instance_norm,
    "group_norm": lambda x: F.group_norm(x, 2, weights(4), weights(4)),
    "layer_norm": lambda x: F.layer_norm(x, [4, 9, 6]),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=2),
    "mse": lambda x: F.mse_loss(x, x / 2),
    "mse of each": lambda x: F.mse_loss(x, x / 2, reduction="none"),
    "l1": lambda x: F.l1_loss(x, x / 2),
    "huber": lambda x: F.huber_loss(x, x / 2),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "nll": lambda x: F.nll_loss(x, LABELS),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()),
    "kl_div": lambda x: F.kl_div(x, x.abs(), reduction="sum"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=2),
    "cosine_embedding": lambda x: F.cosine_embedding_loss(
        x.flatten(0, 2), x.flatten(0, 2) + 1, torch.ones(72)
    ),
    "triplet": lambda x: F.triplet_margin_loss(x, x / 2, x * 2),
    "margin_ranking": lambda x: F.margin_ranking_loss(x, x / 2, x.sign()),
    "gaussian_nll": lambda x: F.gaussian_nll_loss(x, x / 2, x.abs() + 1),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(2),
    "mean": lambda x: x.mean((2, 3)),
    "var": lambda x: x.var(),
    "prod": lambda x: x.prod(2),
    "norm": lambda x: x.norm(dim=2),
    "cumsum": lambda x: x.cumsum(2),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "mean of all": lambda x: x.mean(),
    "std of rows": lambda x: x.std(2),
    "median": lambda x: x.flatten().median(),
    "norm of order inf": lambda x: torch.linalg.vector_norm(x, float("inf"), 2),
    "dist": lambda x: torch.dist(x, x / 3, 4),
    "trace": lambda x: torch.trace(x[0, 0]),
    "vecdot": lambda x: torch.linalg.vecdot(x, x, dim=2),
    "addr": lambda x: torch.addr(torch.ones(1), x[0, 0, :, 0], x[0, 0, 0]),
    "linear of split weights": lambda x: F.linear(
        weights(3, 6), x[0, 0].float(), weights(x.shape[2])
    ),
    "nearest interpolation": lambda x: F.interpolate(x, scale_factor=2),
    "bicubic interpolation": lambda x: F.interpolate(x, scale_factor=1.4, mode="bicubic"),
    "pooling in three dims": lambda x: F.max_pool3d(x[:, :, :, :, None], (2, 1, 1)),
    "lstm cell": lambda x: lstm_cell(x.movedim(2, 0).flatten(1)),
    "lstm": lambda x: lstm(x.movedim(2, 0).flatten(1)[:, None]),
    "amax": lambda x: x.amax(2),
    "cat": lambda x: torch.cat([x.float(), conv(x)], 1),
    "cat of rows": lambda x: torch.cat([x.float(), conv(x)], 2),
    "stack": lambda x: torch.stack([x.float(), conv(x)]),
    "add": lambda x: x.float() + conv(x),
    "add_": lambda x: conv(x).add_(x.float()),
    "where": lambda x: torch.where(x > 0, x, x.float()),
    "addcmul": lambda x: torch.addcmul(x, x, x.float()),
    "pow": lambda x: x.abs() ** 2,
    "exp": torch.exp,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "gelu": F.gelu,
    "prelu": lambda x: F.prelu(x, weights(4)),
    "glu": lambda x: F.glu(x, 1),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "global_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "bilinear interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "grid_sample": lambda x: F.grid_sample(x, torch.full((2, 9, 6, 2), 0.1), align_corners=False),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "rfft2": lambda x: torch.fft.rfft2(x.float()),
    "rfft2 as it is": torch.fft.rfft2,
    "irfft2 as it is": torch.fft.irfft2,
    "attention of split features": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT),
    "masked rows": lambda x: F.linear(x[x[..., 0] > 0], weights(7, 6)),
    "masked loss": lambda x: F.mse_loss(conv(x)[x > 0], x[x > 0]),
    "written by mask": lambda x: written_by_mask(conv(x)),
    "looked up": lambda x: conv(x)[:, :, numbers(x)] * 2,
    "embedding": lambda x: F.linear(F.embedding(numbers(x), weights(9, 6)), weights(7, 6)),
    "scatter_add": lambda x: scattered(conv(x), numbers(x)),
    "index_add": lambda x: torch.zeros_like(x[0, 0]).index_add(0, numbers(x), x[1, 1]),
    "scatter_reduce": lambda x: x[0, 0].scatter_reduce(
        0, numbers(x)[:, None].expand(9, 6), x[1, 1], "amax"
    ),
    "sort of one row": lambda x: x[0, 0, :, 0].sort(stable=True).values,
    "quantile": lambda x: x.float().quantile(0.3),
    "repeated rows": lambda x: conv(x).repeat_interleave(numbers(x) % 3, 2),
    "distances": lambda x: torch.cdist(x[0, 0].float(), x[1, 1].float()),
    "boxes": lambda x: roi_align(x, torch.tensor([[0.0, 1, 1, 5, 7]]).to(x.dtype), 2),
    "deformable": lambda x: deform_conv2d(
        x.float(), x.float()[:, :2], weights(4, 4, 1, 1), mask=x.float()[:, :1]
    ),
    "block": lambda x: F.linear(F.layer_norm(conv(x).relu(), [6]), weights(7, 6)).softmax(-1),
}


NO_KERNEL = {"local_response_norm", "lstm", "rfft2 as it is", "irfft2 as it is"}
if torch.__version__ < "2.15":
    NO_KERNEL.add("trace")


@pytest.mark.spmd(2)
@pytest.mark.parametrize(
    ("name", "narrow"), choose(FUNCTIONS, [torch.bfloat16, torch.float16], every=3), ids=str
)
def test_dtype_and_value(name, narrow):
    check(name, narrow)


@pytest.mark.slow
@pytest.mark.spmd(2)
def test_dtype_and_value_as_on_a_gpu():
    with as_on_gpu():
        for name in FUNCTIONS:
            check(name, torch.bfloat16)


@pytest.mark.spmd(2)
def test_bfloat16_is_transformed_where_one_process_refuses_it():
    """Autocast of a GPU leaves it as it is (docs/spectral.md)."""
    x = torch.randn(SHAPE).bfloat16()
    split = lightning_shard.shard(x, mesh_of(2), 2)
    with as_on_gpu(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="Unsupported dtype BFloat16"):
            torch.fft.rfft2(x)
        spectrum = lightning_shard.gather(torch.fft.rfft2(split))
    torch.testing.assert_close(spectrum, torch.fft.rfft2(x.float()), rtol=1e-2, atol=1e-1)


@pytest.mark.slow
@pytest.mark.spmd(3)
@pytest.mark.parametrize("on", [contextlib.nullcontext, as_on_gpu], ids=["cpu", "as on a gpu"])
def test_a_rank_without_rows_has_the_same_dtype(on):
    """Else its messages are of another size than those that the other ranks wait for."""
    with on():
        wrong = []
        for name, function in FUNCTIONS.items():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(2, 4, 2, 6).to(dtype)
                split = lightning_shard.shard(x, mesh_of(3), 2)
                with torch.autocast("cpu", torch.bfloat16):
                    try:
                        wanted = function(x)
                    except (RuntimeError, NotImplementedError, ValueError, IndexError):
                        continue  # it takes nine rows
                    found = function(split)
                local = found.to_local() if isinstance(found, DomainTensor) else found
                if local.dtype != wanted.dtype:
                    wrong.append(f"{name} of {dtype} is {local.dtype}, not {wanted.dtype}")
        assert not wrong, "\n".join(wrong)


def check(name, narrow):
    for dtype in (torch.float32, narrow):
        x = torch.randn(SHAPE).to(dtype)
        split = lightning_shard.shard(x, mesh_of(2), 2)
        with torch.autocast("cpu", dtype=narrow):
            try:
                wanted = FUNCTIONS[name](x)
            except RuntimeError:  # torch has no kernel for it on the CPU
                assert name in NO_KERNEL
                continue
            found = FUNCTIONS[name](split)
        assert found.dtype == wanted.dtype, (name, dtype)
        size = max(float(wanted.abs().max()), 1)
        # torch's bilinear multiplies in the narrow dtype and returns the wide one; so does a block.
        # On CPUs with kernels of float16 an LSTM cell of half the rows differs by 0.3 eps of that
        narrow_inside = ("bilinear", "block", "lstm cell")
        wide = wanted.dtype in (torch.float32, torch.complex64) and name not in narrow_inside
        tolerance = 1e-5 if wide else 4 * torch.finfo(narrow).eps
        torch.testing.assert_close(
            lightning_shard.gather(found),
            wanted,
            rtol=tolerance,
            atol=tolerance * size,
            msg=f"{name} of {dtype}",
        )
