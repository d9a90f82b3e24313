"""Lists every private name of torch that this package uses, seen in torch 2.11 to 2.15.

`INTERNALS` says what breaks without each name. Where a release of torch has removed some, the first
one that is asked for raises an ImportError that lists all of them.
"""

import functools
import importlib
from typing import Any

import torch

# name -> what breaks without it; a name may have another in some releases, after a bar
INTERNALS = {
    # dispatch of split tensors (tensor/tensor.py)
    "torch.Tensor._make_wrapper_subclass": "a split tensor has a shape and no memory",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "rules are not traced by torch.compile",
    "torch._compile._disable_dynamo": "rules run as they are inside torch.compile",
    "torch._C._is_any_autocast_enabled": "wrong calls are remembered apart under autocast",
    "torch._C._set_storage_data_ptr_access_error_msg": "no one reads a wrapper's memory",
    "torch.distributed.distributed_c10d._resolve_process_group":
        "groups of functional collectives are found",
    "torch.utils._python_dispatch._disable_current_modes": "a prediction reads real numbers",
    "torch.utils._python_dispatch.TorchDispatchMode": "pagers and predictions see operators",
    # the table of rules (ops)
    "torch._C._jit_get_all_schemas": "pointwise functions are found by their tag",
    "torch._C._nn": "pad and the activations of C++ have rules",
    "torch._is_all_true": "torch.distributions checks its arguments by it",
    "torch._make_dual": "dual tensors of forward mode are split",
    "torch._unpack_dual": "the same",
    "torch._nested_tensor_from_mask_left_aligned": "nn.TransformerEncoder is refused by name",
    "torch.Tensor._is_view": "a tensor with views does not become split, a Function returns none",
    "torch.Tensor._is_zerotensor": "gradients that are zeros without memory, as of sgn, are sent",
    "torch.autograd.grad_mode._force_original_view_tracking":
        "ranks without rows keep the graph of views that are written",
    "torch.Tensor._version": "writes into copies of rows, or offloaded tensors, are not noticed",
    "torch._C._storage_Use_Count": "a tensor whose memory others see does not become split",
    "torch.UntypedStorage._cdata": "a prediction counts memory that several tensors share once",
    "torch._subclasses.fake_tensor.FakeTensor": "a step is predicted without numbers",
    "torch._subclasses.fake_tensor.FakeTensorMode": "a step is predicted without numbers",
    "torch._subclasses.fake_tensor.FakeCopyMode": "a step is predicted without numbers",
    # autograd.Functions (tensor/autograd_function.py)
    "torch.autograd.Function._backward_cls": "a Function's node of the graph is known by its class",
    "torch.nn.modules._functions.SyncBatchNorm": "nn.SyncBatchNorm has a rule",
    "torch.nn.modules._functions.BackwardHookFunction": "full backward hooks see split tensors",
    # forward mode and torch.func (domain/forward_mode.py, tensor/transforms.py)
    "torch.autograd.forward_ad._current_level": "collectives carry tangents where others do",
    "torch._C._is_fwd_grad_enabled": "the same",
    "torch._functorch.eager_transforms._jvp_with_argnums": "torch.func.jvp takes split tensors",
    "torch._functorch.eager_transforms._vjp_with_argnums": "torch.func.vjp takes split tensors",
    "torch._functorch.eager_transforms.grad_and_value_impl": "torch.func.grad takes split tensors",
    "torch._functorch.eager_transforms._slice_argnums": "arguments are chosen as torch does",
    # parameters and gradients (fsdp, checkpoint)
    "torch._C._are_functorch_transforms_active": "spectral layers leave torch.func alone",
    "torch._C._current_graph_task_id": "plain gradients are averaged once in a backward pass",
    "torch.autograd.Variable._execution_engine": "plain gradients are averaged after the last one",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset":
        "weights are loaded into DTensors",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state":
        "parameters that a rank has not used get zero gradients",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward":
        "the same",
    "torch.Tensor._backward_hooks":
        "hooks of whole parameters see the mean; those of shards, which FSDP2 drops, are refused",
    "torch.Tensor._post_accumulate_grad_hooks": "the same",
    "torch.distributed.tensor._redistribute.redistribute_local_tensor":
        "a rank that reads shards alone ends",
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers":
        "numbers that are read from shards are refused",
    "torch._decomp.decomposition_table": "losses of shards are those of the whole",
    "torch.autograd._engine_run_backward": "gradients of parameters inside of steps are whole",
    "torch.nn.Module._parameters": "a module's own parameters are replaced by shards",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that no state dict has are computed",
    "torch.nn.Module._apply": "a module moves to its device, but for what is on the meta device",
    "torch.Tensor._base": "a view of a parameter is told from other tensors",
    "torch.amp.grad_scaler.GradScaler._unscale_grads_": "ranks skip a step of float16 together",
    # tensors that are away from the device (memory/paging)
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack":
        "trial calls do not run under modes that count, and threads of tiles have the caller's",
    "torch.overrides._get_current_function_mode_stack":
        "a mode around tiles, which their threads do not have, is refused",
    "torch._C._dispatch_tls_is_dispatch_key_excluded": "the same",
    "torch._C._dispatch_tls_set_dispatch_key_excluded": "the same",
    # containers of tensors: batches, and what modules and steps return
    "torch.utils._pytree.tree_flatten": "blocks take and return split tensors in containers",
    "torch.utils._pytree.tree_unflatten": "blocks take and return split tensors in containers",
    "torch.utils.data._utils.collate.default_collate_fn_map": "DataLoaders batch slabs",
    # processes
    "torch.distributed.device_mesh.DeviceMesh._flatten": "all axes of a mesh have one group",
    "torch.distributed.distributed_c10d._get_default_store": "ranks report failures to each other",
    "torch.distributed.ProcessGroup._get_backend": "meshes are made where a group cannot be split",
    "torch.distributed.distributed_c10d._get_default_group": "modules' collectives count replicas",
    "torch.distributed.distributed_c10d._rank_not_in_group": "modules' collectives count replicas",
    "torch.ScriptObject._type": "collectives of a step that some ranks do not run are refused",
    "torch.distributed._functional_collectives._resolve_group|_resolve_group_name":
        "modules' functional collectives count replicas",
    # ranks that are threads (lab/simulated)
    "torch.distributed.distributed_c10d._world":  # it has pg_map, pg_names and pg_group_ranks
        "a simulated rank, or a fork, has its own process groups; replicas are numbered from 0",
    "torch.distributed.Backend._plugins": "simulated ranks have groups of their own backend",
    "torch._C._distributed_c10d._set_thread_isolation_mode": "threads have groups of one name",
}  # fmt: skip


def missing() -> list[str]:
    """List the names that this torch lacks, each with what breaks without it."""
    return [f"{path}: {use}" for path, use in INTERNALS.items() if not _has(path)]


def _has(path: str) -> bool:
    try:
        find(path)
    except (ImportError, AttributeError):
        return False
    return True


def find(path: str) -> Any:
    """Find the object at a dotted path, the first names of which are modules."""
    name, *rest = path.split(".")
    found: Any = importlib.import_module(name)
    for part in rest:
        name = f"{name}.{part}"
        there = _part(found, part)
        found = importlib.import_module(name) if there is None else there
    return found


def _part(owner: Any, names: str) -> Any:
    """The attribute of one of the names; a class may only announce that its instances have it."""
    announced = getattr(owner, "__annotations__", {}) if isinstance(owner, type) else {}
    there = (getattr(owner, n, announced.get(n)) for n in names.split("|"))
    return next((found for found in there if found is not None), None)


@functools.cache
def internal(path: str) -> Any:
    """Find the object of a name that `INTERNALS` lists.

    Raises:
        ImportError: This torch lacks it; the message lists all that it lacks.
    """
    assert path in INTERNALS, path
    if not _has(path):
        lost = "".join(f"\n  {line}" for line in missing())
        raise ImportError(f"torch {torch.__version__} lacks what lightning_shard uses:{lost}")
    return find(path)
