"""Lists every private name of torch that this package uses, seen in torch 2.11 to 2.15.

`INTERNALS` says what breaks without each name. Where a release of torch has removed some, importing
this module raises one ImportError that lists all of them.
"""

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

# name -> what breaks without it; a name may have another in some releases, after a bar
INTERNALS = {
    # dispatch of split tensors (tensor/tensor.py)
    "torch.Tensor._make_wrapper_subclass": "a split tensor has a shape and no memory",
    "torch._C.DisableTorchFunctionSubclass": "facts of the wrapper are read without a rule",
    "torch._C.TensorBase": "getters and setters of requires_grad and grad_fn are told apart",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "rules are not traced by torch.compile",
    "torch._compile._disable_dynamo": "rules run as they are inside torch.compile",
    "torch._C._is_any_autocast_enabled": "wrong calls are remembered apart under autocast",
    "torch._C._len_torch_dispatch_stack": "trial calls do not run under modes that count",
    "torch._C._set_storage_data_ptr_access_error_msg": "no one reads a wrapper's memory",
    # compiled regions (tensor/compiled.py)
    "torch._dynamo.nonstrict_trace": "blocks are compiled with the rules of split tensors in them",
    "torch._dynamo.exc.TorchDynamoException": "what does not compile runs as it is",
    "torch._inductor.compile_fx.compile_fx": "collectives of compiled blocks are counted",
    "torch._inductor.compile_fx.compile_fx_inner": "collectives of compiled blocks are counted",
    "torch._functorch.config.patch": "backward of a block compiles before its forward runs",
    "torch._functorch.config.force_non_lazy_backward_lowering": "the same",
    "torch._library.custom_ops.CustomOpDef.register_effect": "no rank's graph drops a collective",
    "torch._library.effects.EffectType": "collectives of a graph stay in order",
    "torch.distributed.distributed_c10d._resolve_process_group": "graphs name groups",
    "torch.utils._python_dispatch._disable_current_modes": "constants of compiled blocks are real",
    "torch.utils._python_dispatch.TorchDispatchMode": "compiled blocks call no others",
    # the table of rules (ops)
    "torch._C._jit_get_all_schemas": "pointwise functions are found by their tag",
    "torch._ops.OpOverload": "operators of torch.ops are named in messages",
    "torch._ops.OpOverloadPacket": "pointwise functions are found by their tag",
    "torch._C._nn": "pad and the activations of C++ have rules",
    "torch._C._VariableFunctions.meshgrid": "torch.meshgrid has a rule",
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
    "torch.autograd.function.BackwardCFunction": "a Function's own backward runs inside ours",
    "torch.nn.modules._functions.SyncBatchNorm": "nn.SyncBatchNorm has a rule",
    "torch.nn.modules._functions.BackwardHookFunction": "full backward hooks see split tensors",
    "torch.utils.checkpoint.CheckpointFunction": "reentrant checkpoints take split tensors",
    # TorchScript (tensor/scripted.py)
    "torch.jit.ScriptFunction": "functions of TorchScript are called on split tensors",
    "torch._C.ScriptMethod": "a module of TorchScript is refused by a sentence of its own",
    # forward mode and torch.func (domain/forward_mode.py, tensor/transforms.py)
    "torch.autograd.forward_ad._current_level": "collectives carry tangents where others do",
    "torch._C._is_fwd_grad_enabled": "the same",
    "torch._functorch.eager_transforms._jvp_with_argnums": "torch.func.jvp takes split tensors",
    "torch._functorch.eager_transforms._vjp_with_argnums": "torch.func.vjp takes split tensors",
    "torch._functorch.eager_transforms.grad_and_value_impl": "torch.func.grad takes split tensors",
    "torch._functorch.eager_transforms._chunked_standard_basis_for_":
        "torch.func.jacfwd and jacrev take split tensors",
    "torch._functorch.eager_transforms.linearize": "torch.func.linearize takes split tensors",
    "torch._functorch.eager_transforms._slice_argnums": "arguments are chosen as torch does",
    "torch._functorch.vmap._process_batched_inputs": "vmap maps dims as torch does",
    "torch.utils._pytree._broadcast_to_and_flatten": "the same",
    "torch._functorch.apis.vmap_impl": "torch.func.vmap takes split tensors",
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
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded":
        "a step that has had no backward pass keeps the weights from before its optimizer's step",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook":
        "gradients through tangents are reduced",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
    "._register_post_backward_hook": "the same",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward": "the same",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs":
        "whole parameters outside of steps have the precision in which they are kept",
    "torch.Tensor._backward_hooks":
        "hooks of whole parameters see the mean; those of shards, which FSDP2 drops, are refused",
    "torch.Tensor._post_accumulate_grad_hooks": "the same",
    "torch.distributed.tensor._redistribute.redistribute_local_tensor":
        "a rank that reads shards alone ends",
    "torch.distributed.tensor.DTensor": "`p.data = value` of a shard is refused",
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers":
        "numbers that are read from shards are refused",
    "torch.autograd._engine_run_backward": "gradients of parameters inside of steps are whole",
    "torch.nn.Module._parameters": "a module's own parameters are replaced by shards",
    "torch.nn.Module._buffers": "a module's own buffers leave the meta device",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that no state dict has are computed",
    "torch.nn.Module._apply": "a module moves to its device, but for what is on the meta device",
    "torch.Tensor._base": "a view of a parameter is told from other tensors",
    "torch.amp.grad_scaler.GradScaler._unscale_grads_": "ranks skip a step of float16 together",
    # tensors that are away from the device (fsdp/paging)
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack":
        "a pager is told which memory FSDP2 frees itself",
    "torch.distributed.fsdp._fully_shard._fsdp_param.alloc_storage": "the same",
    "torch.distributed.fsdp._fully_shard._fsdp_param.free_storage": "the same",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.alloc_storage": "the same",
    "torch.overrides._get_current_function_mode_stack":
        "a mode around tiles, which their threads do not have, is refused",
    "torch.utils._device.DeviceContext": "a default device around tiles is not",
    "torch._C.DispatchKey.ADInplaceOrView": "writes of functional collectives are seen",
    "torch._C._dispatch_tls_is_dispatch_key_excluded": "the same",
    "torch._C._dispatch_tls_set_dispatch_key_excluded": "the same",
    "torch._C.DisableTorchFunction": "a pager looks at tensors without being called for it",
    # containers of tensors: batches, and what modules and steps return
    "torch.utils._pytree.keystr": "a tensor of a batch is called by its place",
    "torch.utils._pytree.tree_flatten": "blocks take and return split tensors in containers",
    "torch.utils._pytree.tree_flatten_with_path": "batches are split, and described",
    "torch.utils._pytree.tree_leaves": "batches are counted, and looked through",
    "torch.utils._pytree.tree_map": "blocks take and return split tensors in containers",
    "torch.utils._pytree.tree_map_only": "predictions are moved to the CPU",
    "torch.utils._pytree.tree_unflatten": "blocks take and return split tensors in containers",
    "torch.utils.data._utils.collate.default_collate_fn_map": "DataLoaders batch slabs",
    # processes
    "torch.distributed.device_mesh.DeviceMesh._flatten": "all axes of a mesh have one group",
    "torch.distributed.distributed_c10d._get_default_store": "ranks report failures to each other",
    "torch.distributed.distributed_c10d._world.pg_map": "a fork forgets its parent's groups",
    "torch.distributed.ProcessGroup._get_backend": "meshes are made where a group cannot be split",
    "torch.distributed.ProcessGroup.bound_device_id":
        "meshes are made where a group cannot be split",
    "torch.distributed.Backend.backend_capability": "gloo stands beside xccl",
    "torch.distributed.distributed_c10d._get_default_group": "modules' collectives count replicas",
    "torch.distributed.distributed_c10d._rank_not_in_group": "modules' collectives count replicas",
    "torch.distributed.distributed_c10d._world.pg_group_ranks":
        "modules' collectives number replicas from 0",
    "torch.ScriptObject._type": "collectives of a step that some ranks do not run are refused",
    "torch.distributed._functional_collectives._resolve_group|_resolve_group_name":
        "modules' functional collectives count replicas",
    # ranks that are threads (lab/simulated)
    "torch.distributed.distributed_c10d._world": "a simulated rank has its own process groups",
    "torch.distributed.distributed_c10d._pg_map": "the same",
    "torch.distributed.distributed_c10d._pg_names": "the same",
    "torch.distributed.distributed_c10d._pg_group_ranks": "the same",
    "torch.distributed.distributed_c10d._pg_backend_config": "the same",
    "torch.distributed.distributed_c10d._group_count": "the same",
    "torch.distributed.distributed_c10d._tags_to_pg": "the same",
    "torch.distributed.distributed_c10d._pg_to_tag": "the same",
    "torch.distributed.Backend._plugins": "simulated ranks have groups of their own backend",
    "torch._C._distributed_c10d._set_thread_isolation_mode": "threads have groups of one name",
}  # fmt: skip


def missing() -> list[str]:
    """List the names that this torch lacks, each with what breaks without it."""
    return [f"{path}: {use}" for path, use in INTERNALS.items() if not _has(path)]


def _has(path: str) -> bool:
    try:
        _find(path)
    except (ImportError, AttributeError):
        return False
    return True


def _find(path: str) -> Any:
    """The object at a dotted path, the first names of which are modules."""
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
    return _find(path)


make_wrapper: Callable[..., Any] = internal("torch.Tensor._make_wrapper_subclass")
_forbid: Callable[[int, str], None] = internal("torch._C._set_storage_data_ptr_access_error_msg")
without_rules: Callable[[], Any] = internal("torch._C.DisableTorchFunctionSubclass")
frame_callback: Callable[[], Any] = internal("torch._C._dynamo.eval_frame.get_eval_frame_callback")
untraced: Callable[..., Any] = internal("torch._compile._disable_dynamo")
views_replayed: Callable[[bool], Any] = internal(
    "torch.autograd.grad_mode._force_original_view_tracking"
)
is_autocast: Callable[[], bool] = internal("torch._C._is_any_autocast_enabled")
modes_on_stack: Callable[[], int] = internal("torch._C._len_torch_dispatch_stack")
schemas: Callable[[], list[Any]] = internal("torch._C._jit_get_all_schemas")
functions_of_cpp: Any = internal("torch._C._nn")
make_dual: Callable[..., Tensor] = internal("torch._make_dual")
unpack_dual: Callable[..., tuple[Tensor, Tensor | None]] = internal("torch._unpack_dual")
is_all_true: Callable[[Tensor], Tensor] = internal("torch._is_all_true")
meshgrid: Callable[..., Any] = internal("torch._C._VariableFunctions.meshgrid")
left_aligned: Callable[..., Any] = internal("torch._nested_tensor_from_mask_left_aligned")
in_transform: Callable[[], bool] = internal("torch._C._are_functorch_transforms_active")
# torch has no types for its functions
forward_ad: Any = torch.autograd.forward_ad
carries_tangents: Callable[[], bool] = internal("torch._C._is_fwd_grad_enabled")
backward_pass: Callable[[], int] = internal("torch._C._current_graph_task_id")
default_store: Callable[[], Any] = internal("torch.distributed.distributed_c10d._get_default_store")
FakeTensor: Any = internal("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode: Any = internal("torch._subclasses.fake_tensor.FakeTensorMode")
fake_copies: Any = internal("torch._subclasses.fake_tensor.FakeCopyMode")
without_modes: Callable[[], Any] = internal("torch.utils._python_dispatch._disable_current_modes")
open_modes: Callable[[], list[Any]] = internal(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
)
open_function_modes: Callable[[], list[Any]] = internal(
    "torch.overrides._get_current_function_mode_stack"
)
DeviceContext: Any = internal("torch.utils._device.DeviceContext")
without_functions: Callable[[], Any] = internal("torch._C.DisableTorchFunction")
DispatchMode: Any = internal("torch.utils._python_dispatch.TorchDispatchMode")
BackwardNode: Any = internal("torch.autograd.function.BackwardCFunction")
Operator: Any = internal("torch._ops.OpOverload")
OperatorPacket: Any = internal("torch._ops.OpOverloadPacket")
SyncBatchNorm: Any = internal("torch.nn.modules._functions.SyncBatchNorm")
BackwardHookFunction: Any = internal("torch.nn.modules._functions.BackwardHookFunction")
CheckpointFunction: Any = internal("torch.utils.checkpoint.CheckpointFunction")
ScriptFunction: Any = internal("torch.jit.ScriptFunction")
ScriptMethod: Any = internal("torch._C.ScriptMethod")


def accessors(name: str) -> Any:
    """Find the descriptor of a tensor's attribute; `__torch_function__` is given its methods."""
    return internal("torch._C.TensorBase").__dict__[name]


if TYPE_CHECKING:  # pyright reads their types here
    from torch.utils._pytree import keystr as keystr
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    keystr = internal("torch.utils._pytree.keystr")
    tree_flatten = internal("torch.utils._pytree.tree_flatten")
    tree_flatten_with_path = internal("torch.utils._pytree.tree_flatten_with_path")
    tree_leaves = internal("torch.utils._pytree.tree_leaves")
    tree_map = internal("torch.utils._pytree.tree_map")
    tree_map_only = internal("torch.utils._pytree.tree_map_only")
    tree_unflatten = internal("torch.utils._pytree.tree_unflatten")


def dual_level() -> int:
    """Return the number of the `dual_level` that is open; -1 if none is."""
    assert "torch.autograd.forward_ad._current_level" in INTERNALS
    return torch.autograd.forward_ad._current_level


def is_view(x: Tensor) -> bool:
    """Return whether `x` is a view of another tensor."""
    return internal("torch.Tensor._is_view")(x)


def in_memory(x: Tensor) -> Tensor:
    """Return `x`; of autograd's zeros without memory, zeros with memory, which can be sent."""
    return x.clone() if internal("torch.Tensor._is_zerotensor")(x) else x


def base_of(x: Tensor) -> Tensor:
    """Give the tensor that `x` is a view of, or `x` itself where it is none."""
    base = internal("torch.Tensor._base").__get__(x)
    return x if base is None else base


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Give the dict in which a module holds its own parameters; an entry can be replaced."""
    assert "torch.nn.Module._parameters" in INTERNALS
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Give the dict in which a module holds its own buffers; an entry can be replaced."""
    assert "torch.nn.Module._buffers" in INTERNALS
    return module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Name the module's own buffers that its state dict leaves out."""
    assert "torch.nn.Module._non_persistent_buffers_set" in INTERNALS
    return module._non_persistent_buffers_set


def apply(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Change all parameters, their gradients and all buffers in place, as `Module.to` does."""
    assert "torch.nn.Module._apply" in INTERNALS
    return module._apply(change)


def collate_functions() -> dict[Any, Callable[..., Any]]:
    """Give the functions that batch samples, by class; torch documents that one may add to it."""
    return internal("torch.utils.data._utils.collate.default_collate_fn_map")


def storage_users(x: Tensor) -> int:
    """Count the objects that hold the memory of `x`, among them the storage object of this line."""
    return internal("torch._C._storage_Use_Count")(x.untyped_storage()._cdata)


def users_of_storage(storage: torch.UntypedStorage) -> int:
    """Count the objects that hold a storage, among them this object of Python."""
    return internal("torch._C._storage_Use_Count")(storage._cdata)


def storage_key(x: Tensor) -> int:
    """Give a number of the memory of `x`, which no other memory has while it is there."""
    assert "torch.UntypedStorage._cdata" in INTERNALS
    return x.untyped_storage()._cdata


# the same of a storage
key_of_storage: Callable[[Any], int] = operator.attrgetter("_cdata")

# arguments and results of an operator, and the memory that they share
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")


def version_of(x: Tensor) -> int:
    """Count the writes into the memory of `x`; 0 in inference mode, which does not count."""
    assert "torch.Tensor._version" in INTERNALS
    return 0 if x.is_inference() else x._version


@contextmanager
def counting_writes() -> Generator[None]:
    """Let writes be counted while open, also inside of an operator, where torch counts none."""
    key = internal("torch._C.DispatchKey.ADInplaceOrView")
    change = internal("torch._C._dispatch_tls_set_dispatch_key_excluded")
    before = internal("torch._C._dispatch_tls_is_dispatch_key_excluded")(key)
    change(key, False)
    try:
        yield
    finally:
        change(key, before)


def python_of(scripted: Any) -> Any:
    """Return the Python function that a function of TorchScript was made of; None if it is lost."""
    assert "torch.jit.ScriptFunction" in INTERNALS
    return getattr(scripted, "_torchdynamo_inline", None)


def node_class(function: Any) -> Any:
    """Find the class of an autograd.Function's nodes in the graph."""
    assert "torch.autograd.Function._backward_cls" in INTERNALS
    return function._backward_cls


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that is under way."""
    internal("torch.autograd.Variable._execution_engine").queue_callback(callback)


def parameter_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and reduces for a sharded module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def give_up_whole(module: Any) -> None:
    """Let a sharded module have its shards, also where FSDP2 keeps the whole until backward."""
    for group in parameter_groups(module):
        internal(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded"
        )(group)


def pre_backward_of(state: Any) -> Callable[[Tensor], Tensor]:
    """Return FSDP2's hook that gathers a block's parameters before its backward pass."""
    return state._pre_backward


def gather_of(group: Any) -> Any:
    """Return the collective with which FSDP2 gathers a group of parameters."""
    return group._all_gather_comm


def local_shape_and_offset(*of_tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find shape and offset of this rank's part of a DTensor; imported late, for it loads much."""
    path = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
    return internal(path)(*of_tensor)


def hooks_of(x: Any) -> tuple[Any, Any]:
    """Return the hooks of the gradient of `x`, and those that come once it is added to `.grad`.

    Each is an ordered dict, or None where there have been none.
    """
    assert "torch.Tensor._backward_hooks" in INTERNALS
    return x._backward_hooks, x._post_accumulate_grad_hooks


# the operator by which torch.tensor(x) copies a tensor
copy_of_tensor: Any = torch.ops.aten._to_copy.default
# the operator by which the anomaly mode looks for a NaN
any_is_true: Any = torch.ops.aten._is_any_true.default
# the operator by which Python reads the number of a tensor
read_number: Any = torch.ops.aten._local_scalar_dense.default


def handle_dtensors(operator: Any, handle: Callable[..., Any]) -> None:
    """Let `handle(operator, args, kwargs)` compute an operator of torch that is given DTensors."""
    path = "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers"
    internal(path)[operator] = handle


def handle_some_dtensors(operator: Any, handle: Callable[..., Any]) -> None:
    """Let `handle` compute as for `handle_dtensors`, unless it returns NotImplemented."""
    handlers = internal("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers")

    def handle_some(same: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handle(same, args, kwargs)
        if result is not NotImplemented:
            return result
        handlers.pop(operator, None)
        try:
            return same(*args, **kwargs)
        finally:
            handlers[operator] = handle_some

    handlers[operator] = handle_some


def forbid_memory(wrapper: Tensor, words: str) -> None:
    """Let C++ raise a RuntimeError with these words where it asks for the memory of a wrapper."""
    with without_rules():
        storage = wrapper.untyped_storage()
    _forbid(storage._cdata, words)


def before_redistribution(look: Callable[[tuple[int, ...]], None]) -> None:
    """Let `look(ranks)` run before the ranks of a DTensor exchange what they hold, for good."""
    path = "torch.distributed.tensor._redistribute.redistribute_local_tensor"
    plain = internal(path)

    @functools.wraps(plain)
    def redistribute(local: Tensor, spec: Any, *args: Any, **kwargs: Any) -> Tensor:
        look(tuple(spec.mesh.mesh.flatten().tolist()))
        return plain(local, spec, *args, **kwargs)

    for name, module in [*sys.modules.items()]:  # each has imported it under this name
        held = vars(module).get("redistribute_local_tensor")
        if name.startswith("torch.distributed.tensor.") and held is plain:
            vars(module)["redistribute_local_tensor"] = redistribute


def set_data_of_dtensors(check: Callable[[Any, Any], None]) -> None:
    """Let `check(tensor, value)` see `tensor.data = value` of a DTensor before torch does it."""
    plain: Any = Tensor.data  # typed as a value; it is the descriptor

    def change(tensor: Any, value: Any) -> None:
        check(tensor, value)
        plain.__set__(tensor, value)

    internal("torch.distributed.tensor.DTensor").data = property(plain.__get__, change)


def gathered_by(module: Any) -> list[Any]:
    """Give FSDP2's records of the parameters that it gathers for `module`."""
    return [record for group in parameter_groups(module) for record in group.fsdp_params]


# fields of FSDP2's record of a parameter that depend on the dtype in which it is gathered
_OF_GATHERED_DTYPE = ("param_dtype", "init_dtype_attrs", "all_gather_outputs", "_unsharded_param")


@contextmanager
def gathered_as_kept(module: Any) -> Generator[None]:
    """Let FSDP2, while open, gather for `module` in the dtype of the shards, and cast nothing.

    The parameters must be sharded when this begins and when it ends.
    """
    state = module._get_fsdp_state()
    for group in parameter_groups(module):
        group.lazy_init()  # it sets these dtypes
    cast = [record for record in gathered_by(module) if record.param_dtype is not None]
    policy, state._mp_policy = state._mp_policy, MixedPrecisionPolicy()
    _swap(cast)
    try:
        yield
    finally:
        _swap(cast)
        state._mp_policy = policy


def _swap(records: list[Any]) -> None:
    """Take the memory of the other dtype; each keeps its own, which holds nothing meanwhile."""
    for record in records:
        held = vars(record)
        other = held.pop("_of_other_dtype", None)
        if other is None:
            other = {"param_dtype": None, "init_dtype_attrs": _keep, "all_gather_outputs": []}
        now = {name: held.pop(name) for name in _OF_GATHERED_DTYPE if name in held}
        held.update(other, _of_other_dtype=now)


def _keep(_: MixedPrecisionPolicy) -> None:
    """Leave the dtypes, which FSDP2 would set again from its policy."""


def module_of(record: Any) -> Any:
    """Give the module and the names under which FSDP2's record of a parameter knows it."""
    return record._module_info


def shard_memory_of(record: Any) -> Tensor:
    """Give the memory that FSDP2's record of a parameter takes for this rank's shard."""
    return record._sharded_param_data


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Make the mesh of one axis with the same ranks."""
    return internal("torch.distributed.device_mesh.DeviceMesh._flatten")(mesh, name)


def _of_this_rank(path: str) -> Any:
    """Find the object of a name, anew each time: simulated ranks have objects of their own."""
    assert path in INTERNALS, path
    return _find(path)


def open_groups() -> dict[Any, Any]:
    """Give all process groups of this process, with their stores."""
    return _of_this_rank("torch.distributed.distributed_c10d._world.pg_map")


def number_in_group(group: dist.ProcessGroup) -> None:
    """Call the ranks of the group by their number in it, also as `src` and `dst`."""
    ranks = _of_this_rank("torch.distributed.distributed_c10d._world.pg_group_ranks")
    ranks[group] = {rank: rank for rank in range(group.size())}


def replace_internal(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` makes of a function of a module in its place, for good."""
    owner, _, names = path.rpartition(".")
    module, function = _find(owner), internal(path)
    name = next(name for name in names.split("|") if hasattr(module, name))
    setattr(module, name, make(function))


def keep_in_order(operator: Any) -> None:
    """Let compilers keep all calls of this operator and its like, each once, in their order."""
    internal("torch._library.custom_ops.CustomOpDef.register_effect")(
        operator, internal("torch._library.effects.EffectType").ORDERED
    )


def group_named(name: str) -> dist.ProcessGroup:
    """Find the process group of that `group_name`."""
    return internal("torch.distributed.distributed_c10d._resolve_process_group")(name)


def group_of_collective(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Find the process group among the arguments with which torch dispatches a collective."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            if internal("torch.ScriptObject._type")(arg).qualified_name().endswith("ProcessGroup"):
                return dist.ProcessGroup.unbox(arg)
        elif isinstance(arg, str) and arg in _names_of_groups():
            return group_named(arg)
    return None


def _names_of_groups() -> list[str]:
    return list(internal("torch.distributed.distributed_c10d._world").pg_names.values())


def splits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether groups for that device can be split off the group."""
    return internal("torch.distributed.ProcessGroup._get_backend")(group, device).supports_splitting


# variables of distributed_c10d that know the process groups of this process
_WORLD = ("_world", "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config",
          "_group_count", "_tags_to_pg", "_pg_to_tag")  # fmt: skip


def own_world() -> dict[str, Any]:
    """Give what torch knows of the process groups of this process."""
    return {name: _of_this_rank(f"torch.distributed.distributed_c10d.{name}") for name in _WORLD}


def use_world(world: dict[str, Any]) -> None:
    """Let torch know other process groups; of `new_world()` none."""
    vars(_find("torch.distributed.distributed_c10d")).update(world)


def new_world() -> dict[str, Any]:
    """Return what torch knows where there are no process groups."""
    return {name: type(value)() for name, value in own_world().items()}


def backend_plugins() -> dict[str, Any]:
    """Give what makes process groups, by the name of the backend."""
    return internal("torch.distributed.Backend._plugins")


@contextmanager
def groups_of_threads() -> Generator[None]:
    """Let each thread, while open, know other process groups by the same names."""
    isolate = internal("torch._C._distributed_c10d._set_thread_isolation_mode")
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
