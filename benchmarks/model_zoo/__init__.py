"""Models of other people, small and with random weights: data for the tests and for the table.

Each module of this package has `CASES`, by name; `cases` collects those of a library.
"""

import importlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = {
    "torchvision": ("torchvision", "torchvision_detection"),
    "neuralop": ("neuralop",),
    "transformers": ("transformers_sequence", "transformers_image"),
    "timm": ("timm",),
    "monai": ("monai_networks", "monai_losses"),
    "smp": ("smp",),
    "diffusers": ("diffusers_networks", "diffusers_coders"),
    "torch_geometric": ("graphs",),
    "aurora": ("aurora",),
    "physicsnemo": ("physicsnemo",),
    "torch_harmonics": ("torch_harmonics",),
    "anemoi": ("anemoi",),
    "credit": ("credit",),
    "the_well": ("the_well",),
    "nnunet": ("nnunet",),
    "segment_anything": ("segment_anything",),
    "spandrel": ("spandrel",),
    "x_transformers": ("x_transformers",),
    "terratorch": ("terratorch",),
    "deepinv": ("deepinv",),
    "kornia": ("kornia",),
    "piq": ("piq",),
    "ptwt": ("ptwt",),
    "vit_pytorch": ("vit_pytorch",),
    "handwritten": ("handwritten_fields", "handwritten_steps", "handwritten_attention",
        "handwritten_losses", "handwritten_rows", "points"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An unmodified model and its inputs.

    Attributes:
        make: Makes the module.
        inputs: For each split input its shape, or a function that makes the tensor.
        dims: The dims that a mesh may split, first the one that a mesh of one axis splits.
        tolerance: Relative: 1e-5 or more where the model computes in float32 whatever its weights
            are.
        each: For each input the dims that the axes of a mesh split, where they differ: of nodes the
            first, of `edge_index` the second. A dim may be split by both axes.
    """

    make: Callable[[], nn.Module]
    inputs: Sequence[Any]
    dims: Sequence[int] = (2, 3)
    tolerance: float = 1e-10
    each: Sequence[Sequence[int]] = ()

    def split_by(self, axes: int) -> Sequence[int]:
        """The dim that each axis of a mesh splits; none if there are more axes than dims.

        A sequence, of which one dim may be split, is split by all axes.
        """
        dims = self.each[0] if self.each else self.dims
        dims = [*dims] * axes if len(dims) == 1 else dims
        return dims[:axes] if len(dims) >= axes else []

    def dims_of_each(self, axes: int) -> list[Sequence[int]]:
        """For each input the dims that the axes of a mesh split.

        Where `each` does not name them they are those of the input with most dims; those of the
        others are counted from the end.
        """
        if self.each:
            return [dims[:axes] for dims in self.each]
        ndims = [len(i) if isinstance(i, tuple) else i().ndim for i in self.inputs]
        return [[dim - max(ndims) + n for dim in self.split_by(axes)] for n in ndims]

    def tensors(self) -> list[Tensor]:
        """The inputs, whole and in float64 where they are not integers."""
        return [
            torch.randn(*i, dtype=torch.float64) if isinstance(i, tuple) else i()
            for i in self.inputs
        ]


class Apply(nn.Module):
    """A model behind `function(model, *inputs)`, for those that need more arguments."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.modules_ = nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.modules_, *inputs)


class Float64Defaults(Apply):
    """A model that makes tensors of torch's default dtype while it runs: here of float64."""

    def forward(self, *inputs: Tensor) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().forward(*inputs)
        finally:
            torch.set_default_dtype(before)


class Float32(Apply):
    """A model that cannot run in float64: it stays in float32, and so are its inputs."""

    def double(self) -> "Float32":
        return self

    def forward(self, *inputs: Tensor) -> Any:
        return super().forward(*(x.float() if x.is_floating_point() else x for x in inputs))


def called(model: nn.Module, *inputs: Tensor) -> Any:
    """For the helpers above, where a model takes its inputs as they are."""
    return model(*inputs)


def row(
    kind: Callable[..., nn.Module],
    *arguments: Any,
    on: Any,
    split: Sequence[int] = (),
    within: float = 1e-10,
    run: Callable[..., Any] | None = None,
    wrap: type[Apply] | None = None,
    each: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Case:
    """A row of a table: a constructor, its arguments, and what the model is applied to.

    Args:
        kind: Makes the model from `arguments` and `options`, when the case is run.
        arguments: Positional ones.
        on: The one input as `Case.inputs` has it, or a list of several.
        split: As `Case.dims`; by default all dims of the first input behind batch and channels.
        within: As `Case.tolerance`.
        run: Calls the model, as `run(model, *inputs)`, where more than the inputs is given to it.
        wrap: The class that calls it, if that is not `Apply`.
        each: As `Case.each`.
        options: The named arguments of `kind`.
    """

    def make() -> nn.Module:  # of copies, since a constructor may change a list that it is given
        return kind(*deepcopy(arguments), **deepcopy(options))

    inputs = on if isinstance(on, list) else [on]
    split = split or range(2, len(inputs[0]) if isinstance(inputs[0], tuple) else 4)
    if run or wrap:
        return Case(lambda: (wrap or Apply)(run or called, make()), inputs, split, within, each)
    return Case(make, inputs, split, within, each)


def cases(library: str) -> dict[str, Case]:
    """All cases of a library of `LIBRARIES`.

    Raises:
        ImportError: The library is not installed.
    """
    modules = [importlib.import_module(f"{__name__}.{name}") for name in LIBRARIES[library]]
    return {name: case for module in modules for name, case in module.CASES.items()}


def prepared(module: nn.Module) -> nn.Module:
    """`module` in float64 without dropout, its parameters away from initial zeros and ones."""
    generator = torch.Generator().manual_seed(3)
    for child in module.modules():
        for name, value in vars(child).items():
            drops = "drop" in name.lower() and isinstance(value, float)
            if drops or (name == "p" and "drop" in type(child).__name__.lower()):
                setattr(child, name, 0.0)
        if type(child).__name__ == "StochasticDepth":
            child.p = 0.0
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p += 0.05 * noise.to(p.dtype)
    return module
