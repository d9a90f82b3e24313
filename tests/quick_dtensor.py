"""What torch decides for an operation of DTensors, decided with less work.

For each operation, kind of shards and shape, once, torch tries all combinations of placements on
all dims of the mesh: 20 to 100 ms on a mesh of three dims, and half of the time of tests that train
on four ranks. What it decides is not changed here.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import _dtensor_spec, _sharding_prop
from torch.distributed.tensor._ops import utils

Spec: Any = _dtensor_spec.DTensorSpec
Propagator: Any = _sharding_prop.ShardingPropagator
KEEPS = {f"aten::{name}" for name in ("zeros_like", "clone", "sqrt", "add", "sub", "mul", "div")}
meta_of_torch = Propagator._propagate_tensor_meta_non_cached


def install() -> None:
    """In this process."""
    if hasattr(Spec, "_verify_shard_order"):  # of torch 2.15; older ones decide otherwise
        expand = utils.expand_to_full_mesh_op_strategy
        vars(utils)["expand_to_full_mesh_op_strategy"] = functools.partial(_expand, expand)
        Spec.compute_default_shard_order = staticmethod(
            functools.cache(Spec.compute_default_shard_order)
        )
        Propagator._propagate_tensor_meta_non_cached = _meta
        Spec._verify_shard_order = functools.partialmethod(_verify, Spec._verify_shard_order, set())


def _expand(expand: Any, mesh: Any, schema: Any, strategies: Sequence[Any], **options: Any) -> Any:
    """First without those that move a tensor: torch takes one that moves none if there is one.

    An operation in place never moves its tensor; torch drops such strategies late.
    """
    inputs = (*schema.args_strategy, *schema.kwargs_strategy)
    held = [given.strategies[0].output_spec.placements for given in inputs]
    in_place, first = options.get("inplace_op"), options.get("input_index", 1)
    checked = held[:1] if in_place else held
    staying = [s for s in strategies if _stays([p for p in s[first:] if p is not None], checked)]
    if in_place:
        return expand(mesh, schema, staying or strategies, **options)
    if staying:
        try:
            found = expand(mesh, schema, staying, **options)
        except RuntimeError:  # as of the mean of uneven shards, which moves them
            return expand(mesh, schema, strategies, **options)
        if any([i.placements for i in s.input_specs] == held for s in found.strategies):
            return found
    return expand(mesh, schema, strategies, **options)


def _stays(placements: list[Any], held: list[Any]) -> bool:
    return all(p in of_input for p, of_input in zip(placements, held, strict=False))


def _meta(self: Any, schema: Any) -> Any:
    """Shape, strides and dtype of the result: in place, and where all fit, those of the tensor."""
    first = schema.args_schema[0] if schema.args_schema else None
    if not isinstance(first, Spec):
        return meta_of_torch(self, schema)
    base = schema.op._schema.name
    in_place = base.endswith("_") and not base.endswith("__")
    if in_place or base == "aten::detach" or (base in KEEPS and _all_fit(first, schema)):
        return first.tensor_meta
    return meta_of_torch(self, schema)


def _all_fit(first: Any, schema: Any) -> bool:
    """The tensors are real, contiguous and alike, and what stands beside them changes no dtype."""
    meta = first.tensor_meta
    if not meta.dtype.is_floating_point:
        return False
    if tuple(meta.stride) != make_contiguous_strides_for(meta.shape):
        return False
    alike = all(
        x.tensor_meta == meta if isinstance(x, Spec) else type(x) in (int, float)
        for x in schema.args_schema
    )
    options = {"pin_memory": False, "memory_format": torch.preserve_format}
    given = schema.kwargs_schema.items()
    return alike and all(
        options.get(k) == v or (k == "alpha" and type(v) in (int, float)) for k, v in given
    )


def _verify(self: Any, verify: Any, known: set[Any], order: Any) -> None:
    """Each pair of placements and order once."""
    if (self.placements, order) not in known:
        verify(self, order)
        known.add((self.placements, order))
