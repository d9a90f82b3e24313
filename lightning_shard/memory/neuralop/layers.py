"""Lets neuraloperator's layers allocate this rank's part where they would allocate whole fields.

The values do not change. The coordinates of a grid embedding are views of one vector for each dim,
of which each rank copies its rows. The spectrum of zeros to which a spectral convolution assigns
modes is a `Canvas` from the start. Where no field is split, spectral convolutions of large fields
still transform only the modes that they keep: their input passes as a tensor that is split over one
rank. Small fields take the layer's own transforms, which the host starts sooner.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from lightning_shard.domain.cache import made_once
from lightning_shard.domain.subdomain import domain_of
from lightning_shard.memory.neuralop.factorized import contraction_of, kind_of, multiply
from lightning_shard.ops.spectral.canvas import Canvas
from lightning_shard.ops.spectral.cost import is_small
from lightning_shard.ops.spectral.real_inverse import InversesOfCpu
from lightning_shard.processes.torch_private.internals import in_transform, is_autocast
from lightning_shard.tensor.mixins import is_a, mix_in
from lightning_shard.tensor.placement import from_local
from lightning_shard.tensor.tensor import DomainTensor
from lightning_shard.tiles.tile_tensor import Tiles, TileTensor


def avoid_whole_fields(root: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Let the layers under `root` allocate parts only, where their input is split; in place.

    Args:
        root: The whole network.
        mesh: A domain mesh of one rank, over which inputs that are not split pass.
    """
    for module in list(root.modules()):
        if is_a(module, "neuralop", "GridEmbeddingND", "GridEmbedding2D"):
            mix_in(module, _LocalGrid)
        elif is_a(module, "neuralop", "SpectralConv"):
            mix_in(module, _LazyCanvas, _alone=mesh)


class _LocalGrid:
    """Mixin of a grid embedding."""

    grid_boundaries: list[list[float]]

    def forward(self, data: Tensor, batched: bool = True) -> Any:
        """(B, C, *spatial) -> (B, C + dims, *spatial)."""
        spatial = data.shape[2:]
        if not batched or not isinstance(data, DomainTensor):
            return super().forward(data, batched)  # pyright: ignore[reportAttributeAccessIssue]
        grids: list[Tensor] = []
        for d, (extent, (low, high)) in enumerate(zip(spatial, self.grid_boundaries, strict=True)):
            dtypes = torch.get_default_dtype(), data.dtype
            points = _points(low, high, extent, dtypes, data.device)
            shape = [1, 1, *(extent if d == e else 1 for e in range(len(spatial)))]
            grids.append(points.view(shape).expand(data.shape[0], 1, *spatial))
        return torch.cat((data, *grids), dim=1)


@made_once
def _points(
    low: float,
    high: float,
    extent: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> Tensor:
    """Return the coordinates of a dim, made once: a CUDA graph can copy nothing from the CPU.

    They are made in the first dtype, and rounded to the second one.
    """
    made, wanted = dtypes
    points = torch.linspace(low, high, extent + 1, dtype=made, device="cpu")[:-1]
    return points.to(device, wanted)


class _LazyCanvas:
    """Mixin of a spectral convolution."""

    _alone: DeviceMesh | None
    weight: Any

    @property
    def _contract(self) -> Callable[..., Any]:
        """The layer's own contraction; of factorized weights on this rank's modes or terms."""
        if kind_of(self) is None:
            return self.__dict__["_contract"]
        own = contraction_of(self)
        summed = self.weight.__dict__.get("_summed", ())
        domain = domain_of(self.weight._domain_mesh) if summed else None

        def contract(x: Tensor, weight: Any, separable: bool = False) -> Tensor:
            return multiply(own, x, weight, separable, domain, summed)

        return contract

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; its spectrum of zeros is a `Canvas`."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(x, TileTensor):
            with _ComplexZerosAreCanvases(x.tiles):
                return run(x, *args, **kwargs)
        if isinstance(x, DomainTensor):
            with _ComplexZerosAreCanvases():
                return run(x, *args, **kwargs)
        mesh = self._alone
        if mesh is None or _is_traced():
            return run(x, *args, **kwargs)
        if is_small(x) and self._serves(x):
            with nullcontext() if x.device.type == "cpu" else InversesOfCpu():
                return run(x, *args, **kwargs)
        split = from_local(x, mesh, range(2, 2 + mesh.ndim), x.shape)
        with _ComplexZerosAreCanvases():
            return run(split, *args, **kwargs).to_local()

    def _serves(self, x: Tensor) -> bool:
        """Return True where the layer's own transforms are as exact, and know the type."""
        full = getattr(self, "fno_block_precision", "full") == "full"
        return full and x.dtype in (torch.float32, torch.float64) and not is_autocast()


def _is_traced() -> bool:
    """Return True under torch.compile and torch.func, which need torch's own functions."""
    return torch.compiler.is_compiling() or in_transform()


class _ComplexZerosAreCanvases(TorchFunctionMode):
    """Inside, `torch.zeros` of a complex dtype allocates nothing."""

    def __init__(self, tiles: Tiles | None = None) -> None:
        super().__init__()
        self._tiles = tiles

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is torch.zeros and dtype is not None and dtype.is_complex and len(args) == 1:
            device = torch.device(kwargs.get("device") or "cpu")
            count = 1 if self._tiles is None else self._tiles.count
            canvases = [Canvas.of(tuple(args[0]), dtype, device) for _ in range(count)]
            if self._tiles is not None:
                return TileTensor(self._tiles, canvases)
            return DomainTensor(canvases[0], device)
        return func(*args, **kwargs)
