"""Gives what is private in torch public names here: names.py lists each and what breaks without it.

Where a release of torch has removed some, importing this module raises one ImportError that lists
all of them.
"""

import functools
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.processes.torch_private.names import INTERNALS, find, internal

make_wrapper: Callable[..., Any] = internal("torch.Tensor._make_wrapper_subclass")
_forbid: Callable[[int, str], None] = internal("torch._C._set_storage_data_ptr_access_error_msg")
frame_callback: Callable[[], Any] = internal("torch._C._dynamo.eval_frame.get_eval_frame_callback")
untraced: Callable[..., Any] = internal("torch._compile._disable_dynamo")
views_replayed: Callable[[bool], Any] = internal(
    "torch.autograd.grad_mode._force_original_view_tracking"
)
is_autocast: Callable[[], bool] = internal("torch._C._is_any_autocast_enabled")
schemas: Callable[[], list[Any]] = internal("torch._C._jit_get_all_schemas")
functions_of_cpp: Any = internal("torch._C._nn")
make_dual: Callable[..., Tensor] = internal("torch._make_dual")
unpack_dual: Callable[..., tuple[Tensor, Tensor | None]] = internal("torch._unpack_dual")
is_all_true: Callable[[Tensor], Tensor] = internal("torch._is_all_true")
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
DispatchMode: Any = internal("torch.utils._python_dispatch.TorchDispatchMode")
SyncBatchNorm: Any = internal("torch.nn.modules._functions.SyncBatchNorm")
BackwardHookFunction: Any = internal("torch.nn.modules._functions.BackwardHookFunction")

# public names, of which pyright knows no type
without_rules: Callable[[], Any] = torch.DisableTorchFunctionSubclass  # pyright: ignore
without_functions: Callable[[], Any] = torch.DisableTorchFunction  # pyright: ignore
BackwardNode: Any = torch.autograd.function.BackwardCFunction
CheckpointFunction: Any = torch.utils.checkpoint.CheckpointFunction
ScriptFunction: Any = torch.ScriptFunction
ScriptMethod: Any = torch.ScriptMethod  # pyright: ignore
Operator: Any = type(torch.ops.aten.add.Tensor)
OperatorPacket: Any = type(torch.ops.aten.add)


def accessors(name: str) -> Any:
    """Find the descriptor of a tensor's attribute; `__torch_function__` is given its methods."""
    return getattr(Tensor, name)


if TYPE_CHECKING:  # pyright reads their types here
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_unflatten as tree_unflatten
else:
    tree_flatten = internal("torch.utils._pytree.tree_flatten")
    tree_unflatten = internal("torch.utils._pytree.tree_unflatten")


def tree_leaves(tree: Any) -> list[Any]:
    """List the leaves of containers that torch knows as trees."""
    return tree_flatten(tree)[0]


def tree_map_only(kind: type[Any], function: Callable[[Any], Any], tree: Any) -> Any:
    """Build a tree again with `function` of each leaf of a class in its place."""
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([function(x) if isinstance(x, kind) else x for x in leaves], structure)


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


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own buffers by name; one is replaced by `setattr`."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


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
def with_keys(*names: str) -> Generator[None]:
    """Let functions see these keys of the dispatcher, which are hidden inside of an operator.

    "ADInplaceOrView" counts writes. "Conjugate" and "Negative" tell what views are.
    """
    change = internal("torch._C._dispatch_tls_set_dispatch_key_excluded")
    is_hidden = internal("torch._C._dispatch_tls_is_dispatch_key_excluded")
    keys = [getattr(torch.DispatchKey, name) for name in names]  # pyright: ignore
    before = [(key, is_hidden(key)) for key in keys]
    for key in keys:
        change(key, False)
    try:
        yield
    finally:
        for key, was_hidden in before:
            change(key, was_hidden)


def python_of(scripted: Any) -> Any:
    """Return the Python function that a function of TorchScript was made of; None if it is lost."""
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

    for name, module in sys.modules.copy().items():  # each has imported it under this name
        held = vars(module).get("redistribute_local_tensor")
        if name.startswith("torch.distributed.tensor.") and held is plain:
            vars(module)["redistribute_local_tensor"] = redistribute


def set_data_of_dtensors(check: Callable[[Any, Any], None]) -> None:
    """Let `check(tensor, value)` see `tensor.data = value` of a DTensor before torch does it."""
    plain: Any = Tensor.data  # typed as a value; it is the descriptor

    def change(tensor: Any, value: Any) -> None:
        check(tensor, value)
        plain.__set__(tensor, value)

    vars_of: Any = DTensor
    vars_of.data = property(plain.__get__, change)


def gathered_by(module: Any) -> list[Any]:
    """Give FSDP2's records of the parameters that it gathers for `module`."""
    return [record for group in parameter_groups(module) for record in group.fsdp_params]


def gathers_cast(module: Any) -> bool:
    """Return True if FSDP2 gathers parameters of `module` in another dtype than that of shards."""
    return module._get_fsdp_state()._mp_policy.param_dtype is not None


def module_of(record: Any) -> Any:
    """Give the module and the names under which FSDP2's record of a parameter knows it."""
    return record._module_info


def shard_memory_of(record: Any) -> Tensor:
    """Give the memory that FSDP2's record of a parameter takes for this rank's shard."""
    return record._sharded_param_data


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Make the mesh of one axis with the same ranks."""
    return internal("torch.distributed.device_mesh.DeviceMesh._flatten")(mesh, name)


def open_groups() -> dict[Any, Any]:
    """Give all process groups of this process, with their stores."""
    return own_world().pg_map


def number_in_group(group: dist.ProcessGroup) -> None:
    """Call the ranks of the group by their number in it, also as `src` and `dst`."""
    own_world().pg_group_ranks[group] = {rank: rank for rank in range(group.size())}


def replace_internal(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` makes of a function of a module in its place, for good."""
    owner, _, names = path.rpartition(".")
    module, function = find(owner), internal(path)
    name = next(name for name in names.split("|") if hasattr(module, name))
    setattr(module, name, make(function))


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
    return list(own_world().pg_names.values())


def splits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Say whether groups for that device can be split off the group."""
    return internal("torch.distributed.ProcessGroup._get_backend")(group, device).supports_splitting


def own_world() -> Any:
    """Return the object by which torch knows the process groups of this process.

    It is found anew each time, since simulated ranks have objects of their own.
    """
    return find("torch.distributed.distributed_c10d._world")


def use_world(world: Any) -> None:
    """Let torch know other process groups; of `new_world()` none."""
    vars(find("torch.distributed.distributed_c10d"))["_world"] = world


# properties of torch's object whose values are variables of the module, and how each begins
_OF_MODULE = {"pg_map": dict, "pg_names": dict, "pg_group_ranks": dict, "pg_backend_config": dict,
              "group_count": int, "tags_to_pg": dict, "pg_to_tag": dict}  # fmt: skip


def new_world() -> Any:
    """Return an object as `own_world` does that knows no process groups and holds its own."""
    kind: Any = type("OwnWorld", (type(own_world()),), dict.fromkeys(_OF_MODULE))
    made = kind()
    vars(made).update({name: begin() for name, begin in _OF_MODULE.items()})
    return made


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
