"""Rows of the conformance table for functions that torch's database of operators lacks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from lightning_shard import UnsupportedOperationError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """Forms of one function, and the arguments with which it is tried."""

    functions: Sequence[Callable[..., Any]]
    samples: Callable[[], list[Arguments]]


def matrices(*others: Any, **named: Any) -> Callable[[], list[Arguments]]:
    """A matrix of extents that no number of ranks divides, and a row vector."""
    return lambda: [((torch.randn(shape).double(), *others), named) for shape in ((5, 7), (1, 3))]


def numbers() -> list[Arguments]:
    return [((torch.tensor([[value]]).double(),), {}) for value in (0.0, 2.5)]


def images(*others: Any, **named: Any) -> Callable[[], list[Arguments]]:
    """A batch of two images with four channels, for functions of 1 to 3 spatial dims."""
    return lambda: [
        ((torch.randn(2, 4, *[7, 6, 5][:n]).double(), *others), named) for n in (1, 2, 3)
    ]


def sequences() -> list[Arguments]:
    """Sequences of three lengths, whose rows are vectors, and sequences of numbers."""
    given = [torch.randn(n, 3).double() for n in (5, 2, 4)]
    return [
        ((given,), {}),
        ((given, True, 1.5, "left"), {}),
        (([x[:, 0] for x in given],), {"batch_first": True, "padding_value": -1.0}),
    ]


def assigned(x: Tensor) -> Tensor:
    x[1:4, ::2] = -x[1:4, ::2] * 2
    return x


def of_other_data(x: Tensor) -> Tensor:
    made = x.detach().clone()
    made.data = x.detach() * 2
    return made


def written_back(x: Tensor) -> Tensor:
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    found = x.grad * 2
    del x.grad
    return found


def hooked(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = x * 2
    seen = []
    y.register_hook(lambda g: seen.append(g * 1) or g * 3)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad * 1))
    y.retain_grad()
    (y * y).sum().backward()
    return seen[0] + seen[1] + y.grad


def started(x: Tensor, backward: Callable[..., Any]) -> Tensor:
    x = x.detach().requires_grad_()
    backward(x * x, x * 3)
    return x.grad


def refused(function: Callable[..., Any]) -> Callable[[Tensor], bool]:
    """Functions whose result no rank can know: on a split tensor they must say so."""

    def call(x: Tensor) -> bool:
        if type(x) is Tensor:
            return True
        try:
            function(x)
        except UnsupportedOperationError:
            return True
        raise AssertionError("it was not refused")

    return call


def demanded(x: Tensor) -> Tensor:
    x = x.detach()
    x.requires_grad = True
    return torch.autograd.grad((x * x).sum(), x)[0]


REFUSED = {
    "numpy": Tensor.numpy,
    "array": Tensor.__array__,
    "tolist": Tensor.tolist,
    "dlpack": Tensor.__dlpack__,
    "apply": lambda x: x.apply_(abs),
    "map": lambda x: x.map_(x, lambda a, b: a),
}


def recurrences() -> list[Arguments]:
    """(T, B, E) and weights of as many gates as any recurrence has."""
    shapes = (5, 3, 2), (12, 2), (12, 3)
    return [(tuple(torch.randn(shape).double() for shape in shapes), {})]


def layer(
    function: Callable[..., Any], gates: int, *, cell: bool = False
) -> Callable[..., list[Tensor]]:
    """`function` with three hidden features and weights of `gates` times as many rows."""

    def run(x: Tensor, wi: Tensor, wh: Tensor) -> list[Tensor]:
        weights = [wi[: 3 * gates], wh[: 3 * gates]]
        start = torch.zeros(3 if cell else 1, *([] if cell else [3]), 3).double()
        start = (start, start) if gates == 4 else start
        if cell:
            found = function(x[0], start, *weights)
        else:
            found = function(x, start, weights, False, 1, 0.0, False, False, False)
        return [found] if isinstance(found, Tensor) else list(found)

    return run


ROWS: dict[str, Row] = {
    "recurrence": Row(
        [layer(torch.lstm, 4), layer(torch.gru, 3), layer(torch.rnn_tanh, 1),
         layer(torch.rnn_relu, 1), layer(torch.lstm_cell, 4, cell=True),
         layer(torch.gru_cell, 3, cell=True), layer(torch.rnn_tanh_cell, 1, cell=True),
         layer(torch.rnn_relu_cell, 1, cell=True)],
        recurrences,
    ),
    **{f"refused.{name}": Row([refused(f)], matrices()) for name, f in REFUSED.items()},
    "number": Row(
        [Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__complex__,
         torch.is_nonzero, Tensor.is_nonzero],
        numbers,
    ),
    "as_index": Row([Tensor.__index__], lambda: [((torch.tensor([3]),), {})]),
    "contains": Row([lambda x: float(x.sum()) in x, lambda x: 7.5 in x * 0 + 7.5], matrices()),
    "text": Row([lambda x: str(x.shape) in f"{x} {x!r} torch.Size([5, 7]) torch.Size([1, 3])"],
                matrices()),
    "iter": Row([lambda x: list(Tensor.__iter__(x))], matrices()),
    "chained": Row(
        [torch.chain_matmul],
        lambda: [(tuple(torch.randn(s).double() for s in ((5, 3), (3, 7), (7, 2))), {})],
    ),
    "arithmetic": Row(
        [Tensor.__div__, Tensor.__idiv__, Tensor.__truediv__, Tensor.__floordiv__,
         Tensor.__ifloordiv__, Tensor.__rfloordiv__, Tensor.__mod__, Tensor.__imod__],
        matrices(2.5),
    ),
    "distinct": Row([lambda x: torch.unique(x.detach()), lambda x: x.detach().round().unique(),
                   lambda x: torch.unique(x.detach().round(), return_counts=True),
                   lambda x: x.detach().round().unique(return_inverse=True, return_counts=True),
                   lambda x: torch.unique(x.detach() > 0, return_inverse=True),
                   lambda x: torch.unique(x.detach().round(), True, True, True, dim=-1),
                   lambda x: torch.unique_consecutive(x.detach().round()),
                   lambda x: Tensor.unique_consecutive(x.round(), True, True)], matrices()),
    "counted": Row(
        [lambda x: torch.bincount((x[:, 0] * 3).long().abs(), x[:, 1], 4),
         lambda x: torch.bincount((x[:, 0] * 3).long().abs(), torch.arange(len(x)).double()),
         lambda x: torch.bincount(torch.arange(len(x)) % 3, x[:, 0])], matrices(),
    ),
    "boxes": Row(
        [lambda x: torchvision.ops.nms(x[:, :4].abs().cumsum(1), x[:, 0], 0.3),
         lambda x: torchvision.ops.roi_align(x[None, None], x[:, :5].abs().cumsum(1) * 0, 2)],
        matrices(),
    ),
    "deformed": Row(
        [lambda x, w: torchvision.ops.deform_conv2d(x, x[:, :1].repeat(1, 2, 1, 1), w)],
        lambda: [((torch.randn(2, 3, 7, 6).double(), torch.randn(4, 3, 1, 1).double()), {})],
    ),
    "fill_diagonal_": Row(
        [lambda x: (x * 2).fill_diagonal_(3.0), lambda x: (x.T * 2).fill_diagonal_(3.0, wrap=True),
         lambda x: (x > 0).fill_diagonal_(True), lambda x: Tensor.fill_diagonal_(x.detach(), 0)],
        matrices(),
    ),
    "setitem": Row([assigned, of_other_data], matrices()),
    "sparse": Row(
        [lambda x: torch.sparse.mm(torch.ones(3, x.shape[0]).double().to_sparse(), x)], matrices()
    ),
    "copy": Row([lambda x: torch.empty_like(x).copy_(x), lambda x: x.new_tensor([1.0, 2.0])],
                matrices()),
    "convert": Row(
        [Tensor.cpu, Tensor.detach, torch.detach, lambda x: x.data * 2,
         lambda x: (x * 2).detach_(), lambda x: torch.detach_(x * 2),
         lambda x: x.type(torch.float32), lambda x: x.type_as(torch.ones(1).float()),
         lambda x: x.requires_grad_(), demanded],
        matrices(),
    ),
    "random_": Row([lambda x: x.new_empty(x.shape).random_(0, 1), Tensor.random_,
                    lambda x: torch.poisson(x.abs())], matrices()),
    "dropout": Row(
        [torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_alpha_dropout,
         torch.feature_dropout, F.dropout1d],
        images(0.5, True),
    ),
    "gumbel_softmax": Row([F.gumbel_softmax], matrices(dim=-1)),
    "max_pool": Row(
        [torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.max_pool1d_with_indices,
         F.max_pool1d_with_indices],
        images(3, 2, 1),
    ),
    "lp_pool": Row([F.lp_pool1d, F.lp_pool2d, F.lp_pool3d], images(2.0, 3, 2)),
    "adaptive_max_pool": Row(
        [torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices,
         F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices],
        images(3),
    ),
    "channel_shuffle": Row([torch.native_channel_shuffle], images(2)),
    "pad_sequence": Row([torch._C._nn.pad_sequence], sequences),
    "pad": Row([F.pad, torch._C._nn.pad], images((2, 1), "reflect")),
    "fold": Row([F.fold], lambda: [((torch.randn(2, 8, 12).double(), (4, 5), 2), {})]),
    "affine_grid": Row(
        [F.affine_grid, torch.affine_grid_generator],
        lambda: [((torch.randn(3, 2, 3).double(), (3, 1, 4, 5), True), {})],
    ),
    "soft_margin_loss": Row([lambda x: F.soft_margin_loss(x, x.detach().sign())], matrices()),
    "nested_tensor": Row(
        [torch._nested_tensor_from_mask_left_aligned],
        lambda: [((torch.randn(2, 3, 4), torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()), {})],
    ),
    "autograd": Row(
        [written_back, hooked, lambda x: started(x, Tensor.backward),
         lambda x: started(x, torch.autograd.backward)],
        matrices(),
    ),
}  # fmt: skip
