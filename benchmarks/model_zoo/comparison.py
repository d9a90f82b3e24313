"""A model split over ranks beside the same model in one process: how far apart they are."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import lightning_shard
from benchmarks.model_zoo import Case, prepared
from lightning_shard import Tiles

FLOOR = 1e-3  # of the largest output or gradient: errors of smaller ones are relative to this


def differences(case: Case, mesh: DeviceMesh | Tiles) -> dict[str, float]:
    """Relative errors in train mode, by name: outputs, gradients of inputs and parameters, buffers.

    Args:
        case: The model and its inputs.
        mesh: The domain mesh, of all ranks, or tiles of this process.

    Returns:
        The largest difference of each tensor over its largest value; infinite where shapes, dtypes
        or places of NaN differ.

    Raises:
        UnsupportedOperationError: The model cannot run split.
        ValueError: There is no gradient to compare.
    """
    split_model, model = made(case), made(case)  # in a copy, a model's own closures would not be
    inputs = case.tensors()
    whole = [_leaf(x) for x in inputs]
    expected = _backward(model, whole)
    leaves = [_leaf(x) for x in inputs]
    found = _backward(split_model, parts(case, leaves, mesh))

    if len(found) != len(expected):
        return {"outputs": float("inf")}
    named = [(f"output {i}", *pair) for i, pair in enumerate(zip(found, expected, strict=True))]
    errors = relative_errors(named)
    pairs = [(f"input {i}", a, b) for i, (a, b) in enumerate(zip(leaves, whole, strict=True))]
    theirs = dict(model.named_parameters())
    pairs += [(name, p, theirs[name]) for name, p in split_model.named_parameters()]
    gradients = [
        (f"gradient of {name}", _mean(a, mesh), torch.zeros_like(b) if b.grad is None else b.grad)
        for name, a, b in pairs
        if b.requires_grad
    ]
    if not any(_largest(b) for _, _, b in gradients):
        raise ValueError("all gradients of the one-process run are zero: nothing to compare")
    errors |= relative_errors(gradients)
    theirs = dict(model.named_buffers())
    for name, buffer in split_model.named_buffers():
        errors[f"buffer {name}"] = _error(buffer, theirs[name], 0.0)
    return errors


def rounding(case: Case) -> float:
    """How far the plain model's results move when each input moves by one unit in the last place.

    Returns:
        The largest relative error of outputs and gradients, as in `differences`. A computation
        that differs in the order of its sums cannot be nearer than about this.
    """
    inputs = case.tensors()
    found: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for given in (inputs, [_next_number(x) for x in inputs]):
        model, leaves = made(case), [_leaf(x) for x in given]
        outputs = _backward(model, leaves)
        named = {f"input {i}": x for i, x in enumerate(leaves)} | dict(model.named_parameters())
        gradients = {name: x.grad for name, x in named.items() if x.grad is not None}
        found.append((outputs, gradients))
    (outputs, gradients), (others, other_gradients) = found
    pairs = zip(others, outputs, strict=True)
    errors = relative_errors([(f"output {i}", *pair) for i, pair in enumerate(pairs)])
    errors |= relative_errors([(name, other_gradients[name], x) for name, x in gradients.items()])
    return max(errors.values())


def _next_number(x: Tensor) -> Tensor:
    return torch.nextafter(x, x.sign() * math.inf) if x.is_floating_point() else x


def made(case: Case) -> nn.Module:
    """The model of a case, the same each time."""
    torch.manual_seed(5)
    return prepared(case.make()).train()


def parts(case: Case, inputs: Sequence[Tensor], mesh: DeviceMesh | Tiles) -> list[Tensor]:
    """The inputs of a case, split over the ranks."""
    each = zip(
        inputs, case.dims_of_each(mesh.ndim), strict=True,
    )  # fmt: skip
    return [lightning_shard.shard(x, mesh, dims) for x, dims in each]


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point() or x.is_complex())


def _backward(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The whole outputs, after the backward pass of their sum with random weights."""
    torch.manual_seed(6)
    outputs = [lightning_shard.gather(x) for x in tensors_of(model(*inputs))]
    generator = torch.Generator().manual_seed(9)
    losses = []
    for x in outputs:
        if x.requires_grad:
            seed = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            losses.append((x * seed).sum().real if x.is_complex() else (x * seed).sum())
    if losses:
        torch.stack(losses).sum().backward()
    return [x.detach() for x in outputs]


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of what a model returns."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [x for y in output for x in tensors_of(y)] if isinstance(output, list | tuple) else []


def _mean(leaf: Tensor, mesh: DeviceMesh | Tiles) -> Tensor:
    """The gradient: the mean over ranks, each of which started backward with its replica."""
    mean = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
    if isinstance(mesh, Tiles):
        return mean
    mean = mean.detach() / dist.get_world_size()
    dist.all_reduce(torch.view_as_real(mean) if mean.is_complex() else mean)
    return mean


def relative_errors(named: Sequence[tuple[str, Tensor, Tensor]]) -> dict[str, float]:
    """Of each name the largest difference of its two tensors over the largest value."""
    largest = max((_largest(b) for _, _, b in named), default=0.0)
    return {name: _error(a, b, FLOOR * largest) for name, a, b in named}


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    difference = _largest(found.nan_to_num() - expected.nan_to_num())
    return difference / max(_largest(expected), floor, 1e-30)


def _largest(x: Tensor) -> float:
    """The largest magnitude of numbers of `x`; 0 of integers."""
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return float(x.detach().nan_to_num().abs().max())
