"""The oracle is one process: a function of split tensors gives its output and its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lightning_shard
from lightning_shard import DomainTensor
from lightning_shard.domain.subdomain import Subdomain
from lightning_shard.tiles.tile_tensor import Tiles

_MESHES: dict[Any, DeviceMesh] = {}
_TILES: dict[tuple[int, ...], Tiles] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """A CPU mesh over all ranks of the pool; made once."""
    key = shape, dist.group.WORLD  # of which each simulated rank has its own
    if key not in _MESHES:
        names = tuple(f"domain_{axis}" for axis in range(len(shape)))
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[key]


def tiles_of(*sizes: int) -> Tiles:
    """Tiles of this process; made once."""
    if sizes not in _TILES:
        _TILES[sizes] = Tiles(sizes)
    return _TILES[sizes]


def ranks_of(mesh: DeviceMesh | Tiles) -> int:
    """Count the ranks, each of which starts the backward pass of its replica."""
    return 1 if isinstance(mesh, Tiles) else dist.get_world_size()


def assert_parity(
    function: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    split: dict[int, Sequence[int]],
    mesh: DeviceMesh | Tiles,
    *,
    dtype: torch.dtype = torch.float64,
    make: Callable[[Sequence[int]], Tensor] = torch.randn,
    tolerance: float | None = None,
) -> None:
    """`function` of split tensors equals the one-process run: outputs and gradients of every input.

    Args:
        function: Takes one tensor for each shape; returns a tensor or a tuple of tensors.
        shapes: Global shapes of the inputs.
        split: For each input to be split the dims that the mesh axes split; the others stay plain,
        as
            parameters do.
        mesh: The domain mesh: all ranks; or tiles of this process.
        dtype: Of the inputs.
        make: Makes an input of a shape.
        tolerance: Relative, where the function itself computes in a narrower dtype.
    """
    torch.manual_seed(1)
    inputs = [_cast(make(shape), dtype).requires_grad_() for shape in shapes]
    expected = _tensors(function(*inputs))
    seeds = [torch.randn_like(e) if e.requires_grad else e for e in expected]
    wanted = _gradients(expected, inputs, seeds)

    given = [x.detach().clone().requires_grad_() for x in inputs]
    operands = [
        lightning_shard.shard(x, mesh, split[i]) if i in split else x for i, x in enumerate(given)
    ]
    results = _tensors(function(*operands))
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        assert result.shape == value.shape, (
            f"shape {tuple(result.shape)}, expected {tuple(value.shape)}"
        )
        assert result.dtype == value.dtype
        _assert_canonical(result)
        torch.testing.assert_close(
            lightning_shard.gather(result).detach(), value.detach(), **_close(value, tolerance)
        )
    ranks = ranks_of(mesh)
    wholes = [lightning_shard.gather(r) for r in results]
    partial = _gradients(wholes, given, seeds)
    for i, (gradient, value) in enumerate(zip(partial, wanted, strict=True)):
        total = gradient.contiguous() / ranks  # every rank starts the backward of its replica
        if ranks > 1:
            dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
        torch.testing.assert_close(
            total,
            value,
            **_close(value, tolerance),
            msg=lambda m, i=i: f"gradient of input {i}: {m}",
        )


def assert_parity_of_module(
    module: nn.Module,
    shapes: Sequence[int] | Sequence[Sequence[int]],
    dims: Sequence[int],
    mesh: DeviceMesh | Tiles,
    **options: Any,
) -> None:
    """The same for an unmodified module: gradients of its inputs and of all its parameters."""
    inputs = [shapes] if isinstance(shapes[0], int) else list(shapes)
    names = [name for name, _ in module.named_parameters()]
    values = [p.detach().clone() for p in module.parameters()]
    count = len(inputs)

    def function(*tensors: Tensor) -> Any:
        weights = dict(zip(names, tensors[count:], strict=True))
        return torch.func.functional_call(module, weights, tensors[:count])

    made = iter(range(count + len(values)))

    def make(shape: Sequence[int]) -> Tensor:
        i = next(made)
        return torch.randn(shape, dtype=torch.float64) if i < count else values[i - count]

    assert_parity(
        function,
        [*inputs, *(v.shape for v in values)],
        dict.fromkeys(range(count), dims),
        mesh,
        make=make,
        **options,
    )


def _assert_canonical(result: Tensor) -> None:
    if isinstance(result, DomainTensor):
        part = result._part
        if not isinstance(part, Subdomain):
            return
        assert tuple(part.local.shape) == part.layout.local_shape, (part.local.shape, part.layout)


def assert_same(
    found: Tensor, expected: Tensor, what: str = "output", tolerance: float | None = None
) -> None:
    """Equal to 1e-10 (float64) or 1e-5 (float32) of the value, or of the largest one near zero."""
    torch.testing.assert_close(
        found, expected, equal_nan=True, msg=lambda m: f"{what}: {m}", **_close(expected, tolerance)
    )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().clone() if x.is_complex() else x.detach().to(dtype, copy=True)


def _close(expected: Tensor, tolerance: float | None = None) -> dict[str, float]:
    """1e-10 (float64) or 1e-5 (float32) of the value, or of the largest one near zero."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return {"rtol": 0.0, "atol": 0.0}
    wide = expected.dtype in (torch.float64, torch.complex128)
    tolerance = tolerance or (1e-10 if wide else 1e-5)
    sizes = expected.detach().abs().flatten()
    largest = float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0
    return {"rtol": tolerance, "atol": tolerance * max(largest, 0.1)}


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Tensor]:
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    loss = sum((o * s).sum().real if o.is_complex() else (o * s).sum() for o, s in pairs)
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(inputs), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


def _tensors(result: Any) -> list[Tensor]:
    return (
        [t for t in result if isinstance(t, Tensor)]
        if isinstance(result, tuple | list)
        else [result]
    )


def assert_double_backward(
    function: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    split: dict[int, Sequence[int]],
    mesh: DeviceMesh | Tiles,
    *,
    make: Callable[[Sequence[int]], Tensor] = torch.randn,
) -> None:
    """The gradient of a squared gradient norm, and the gradient, equal the one-process run."""
    torch.manual_seed(1)
    inputs = [_cast(make(shape), torch.float64).requires_grad_() for shape in shapes]
    wanted = _penalty(function, inputs)
    expected = torch.autograd.grad(wanted, inputs, allow_unused=True)

    given = [x.detach().clone().requires_grad_() for x in inputs]
    operands = [
        lightning_shard.shard(x, mesh, split[i]) if i in split else x for i, x in enumerate(given)
    ]
    penalty = _penalty(function, operands)
    torch.testing.assert_close(penalty, wanted, **_close(wanted))
    found = torch.autograd.grad(penalty, given, allow_unused=True)
    for i, (gradient, value) in enumerate(zip(found, expected, strict=True)):
        total = torch.zeros_like(given[i]) if gradient is None else gradient.contiguous()
        total = total / ranks_of(mesh)
        if ranks_of(mesh) > 1:
            dist.all_reduce(total)
        wanted_i = torch.zeros_like(inputs[i]) if value is None else value
        torch.testing.assert_close(
            total,
            wanted_i,
            **_close(wanted_i),
            msg=lambda m, i=i: f"second gradient of input {i}: {m}",
        )


def _penalty(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensor:
    """The squared norm of the gradient of the squared outputs, by every input."""
    loss = sum((o * o).sum() for o in _tensors(function(*inputs)))
    gradients = torch.autograd.grad(loss, list(inputs), create_graph=True)
    total = sum((g * g).sum() for g in gradients)
    assert isinstance(total, Tensor)
    return total
