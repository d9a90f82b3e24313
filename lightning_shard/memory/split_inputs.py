"""Lets a module take whole tensors, run on split ones, and give back whole ones: inference."""

import difflib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.data.same_batch import first_difference, identity_of
from lightning_shard.data.split import ShardDims, shard_batch
from lightning_shard.data.tree import leaves_of, map_leaves
from lightning_shard.memory.neuralop.layers import avoid_whole_fields
from lightning_shard.processes.agreement import DisagreementError
from lightning_shard.processes.arguments import check_mesh, check_module, names_of
from lightning_shard.tensor.local_mesh import LocalMesh
from lightning_shard.tensor.placement import gather as gathered
from lightning_shard.tensor.placement import is_field

_VALUES = (bool, int, float, complex, str)
_changing = threading.Lock()
_REPLACED = "_methods_that_split"  # the attribute of a module


class _Replaced(set[str]):
    """The names of methods that split their calls. A copy would compute with the first's weights.

    It is an attribute of the module, so that nobody copies or stores the module meanwhile.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a module cannot be copied or pickled within split_inputs or in_tiles, since the copy "
            "would compute with this one's weights; copy it before, or store its state_dict()."
        )


@contextmanager
def split_inputs(
    module: nn.Module,
    mesh: DeviceMesh | LocalMesh,
    shard_dims: ShardDims = None,
    *,
    methods: Sequence[str] = ("forward",),
    gather: bool = True,
) -> Generator[None]:
    """Split what `module` is called with over the ranks of `mesh`, and put its results together.

    Within it every rank makes the same calls with the same whole tensors, as one process would.
    Each rank then computes its part. Nothing of the module's code changes. Its weights may be whole
    on each rank, or sharded by `parallelize`. No Trainer is needed.

    Args:
        module: A network, or what holds one and calls it, on the device of the mesh.
        mesh: The domain mesh, of one or several axes; or tiles of this process.
        shard_dims: None: of every floating-point argument (B, C, H, W, ...) the first spatial dims,
            one for each mesh axis. An int, or one for each mesh axis: these dims of every
            floating-point argument of 3 dims or more. A mapping: the dims of each argument by its
            name, such as `{"sample": 2}`; arguments that are not named stay whole.
        methods: The methods that take whole tensors, such as "encode" and "decode".
        gather: True makes results whole on every rank. With False they stay split, and another
            module that is called within `split_inputs` takes them as they are.

    Raises:
        ValueError: The module has no such method, or none with an argument that `shard_dims` names;
            or another `with` splits its calls. A call in which no tensor is split raises it, too.
        TypeError: The module, the mesh or a method's name is none.
        DisagreementError: The ranks called with different values, such as random numbers from
            different seeds.

    Example:
        >>> mesh = init_mesh({"domain": 4})
        >>> with torch.inference_mode(), split_inputs(vae, mesh, methods=["decode"]):
        ...     image = vae.decode(latents).sample  # whole, on every rank
    """
    if not isinstance(mesh, LocalMesh):
        check_mesh(mesh)
    check_module(module, "split_inputs")
    methods = names_of(methods, "methods")
    with replacing(module, methods), splitting(module, mesh, shard_dims, methods, gather=gather):
        yield


@contextmanager
def replacing(module: nn.Module, methods: Sequence[str]) -> Generator[None]:
    """Keep others from replacing methods of a module, and from putting back what is replaced here.

    Raises:
        ValueError: Another one, perhaps in another thread, has replaced one of them.
    """
    with _changing:
        held = vars(module).setdefault(_REPLACED, _Replaced())
        if again := [name for name in methods if name in held]:
            raise ValueError(
                f"{again[0]} of {type(module).__name__} is in split_inputs or in_tiles already; "
                "leave one of them out. Threads may share one: open it around all of them."
            )
        held.update(methods)
    try:
        yield
    finally:
        with _changing:
            held.difference_update(methods)
            if not held:
                del vars(module)[_REPLACED]


@contextmanager
def splitting(
    module: nn.Module,
    mesh: DeviceMesh | LocalMesh,
    shard_dims: ShardDims,
    methods: Sequence[str],
    *,
    gather: bool,
) -> Generator[None]:
    """Split the calls of methods that nobody else replaces meanwhile; see `split_inputs`."""
    calls = {name: _method(module, name) for name in methods}
    signatures = {name: _signature(module, name) for name in methods}
    if isinstance(shard_dims, Mapping):
        _check_names(shard_dims, signatures)
    avoid_whole_fields(module)
    before = {name: vars(module)[name] for name in methods if name in vars(module)}
    running = set[int]()  # threads in which a method runs that was called from outside
    for name, method in calls.items():
        split = functools.partial(_split, name, signatures[name], mesh, shard_dims, gather)
        setattr(module, name, _splitting(method, split, running, gather=gather))
    try:
        yield
    finally:
        for name in calls:
            delattr(module, name)
        for name, method in before.items():
            setattr(module, name, method)


def _method(module: nn.Module, name: str) -> Callable[..., Any]:
    method = getattr(module, name, None)
    if not callable(method):
        near = difflib.get_close_matches(name, dir(module), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "name one that it has."
        raise ValueError(f"{type(module).__name__} has no method {name!r}; {hint}")
    return method


def _signature(module: nn.Module, name: str) -> inspect.Signature:
    """Return the signature in the class; of a method that FSDP2 wraps, an argument is lost."""
    of_class = getattr(type(module), name, None)
    return inspect.signature(of_class.__get__(module) if of_class else getattr(module, name))


def _check_names(
    shard_dims: Mapping[str, Any], signatures: Mapping[str, inspect.Signature]
) -> None:
    parameters = [p for signature in signatures.values() for p in signature.parameters.values()]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return
    known = list(dict.fromkeys(p.name for p in parameters))
    if unknown := [name for name in shard_dims if name not in known]:
        raise ValueError(
            f"shard_dims names the argument {unknown[0]!r}, but {', '.join(signatures)} take "
            f"{known}; use one of these."
        )


def wraps(method: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator as `functools.wraps` does, whose result names the first method of a chain.

    Lightning asks one level down which arguments a step takes.
    """

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = functools.wraps(method)(call)
        wrapper.__wrapped__ = inspect.unwrap(method)
        return wrapper

    return decorate


def _splitting(
    method: Callable[..., Any],
    split: Callable[..., inspect.BoundArguments],
    running: set[int],
    *,
    gather: bool,
) -> Callable[..., Any]:
    """The method for whole tensors; where another such method calls it, it is the method itself."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (thread := threading.get_ident()) in running:
            return method(*args, **kwargs)
        given = split(args, kwargs)
        running.add(thread)
        try:
            result = method(*given.args, **given.kwargs)
        finally:
            running.discard(thread)
        return map_leaves(_gathered, result) if gather else result

    return call


def _split(
    name: str,
    signature: inspect.Signature,
    mesh: DeviceMesh | LocalMesh,
    shard_dims: ShardDims,
    gather: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> inspect.BoundArguments:
    """The arguments of a call with split tensors in place of whole ones."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as err:
        raise TypeError(f"{name}(): {err}") from None
    given = _by_name(bound)
    identities: dict[str, Any] = {"shard_dims": str(shard_dims), "gather": gather}
    identities |= {key: _identities(v) for key, v in given.items()}
    if not isinstance(mesh, LocalMesh) and (found := first_difference(identities, mesh)):
        ranks, argument = found
        raise DisagreementError(
            f"the ranks {ranks} share each call of {name}, but gave different values for the "
            f"argument {argument!r}; call it with the same on all, and draw random numbers from "
            "the same seed."
        )
    if isinstance(shard_dims, Mapping):
        shard_dims = {key: dims for key, dims in shard_dims.items() if key in given}
    split = shard_batch(given, mesh, shard_dims)
    if not any(is_field(x) for value in split.values() for x in _leaves(value)):
        raise ValueError(
            f"no tensor in the call of {name} was split, so each rank would compute the whole; of "
            f"the arguments {list(given)} name the dims to split, as in "
            f"shard_dims={{{next(iter(given), 'x')!r}: 2}}."
        )
    bound.arguments = _by_parameter(bound, iter(split.values()))
    return bound


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call by name; those of `*args` by their position."""
    given: dict[str, Any] = {}
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        if kind == inspect.Parameter.VAR_POSITIONAL:
            given |= {str(len(given) + number): each for number, each in enumerate(value)}
        else:
            given |= value if kind == inspect.Parameter.VAR_KEYWORD else {parameter: value}
    return given


def _by_parameter(bound: inspect.BoundArguments, values: Iterator[Any]) -> dict[str, Any]:
    """The values of `_by_name` as a signature takes them."""
    arguments: dict[str, Any] = {}
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        if kind == inspect.Parameter.VAR_POSITIONAL:
            arguments[parameter] = tuple(next(values) for _ in value)
        elif kind == inspect.Parameter.VAR_KEYWORD:
            arguments[parameter] = {key: next(values) for key in value}
        else:
            arguments[parameter] = next(values)
    return arguments


def _identities(value: Any) -> tuple[Any, ...]:
    """Return values that are equal on all ranks that make the same call."""
    return tuple(identity_of(x) if isinstance(x, Tensor) else repr(x) for x in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    return [x for x in leaves_of(value) if isinstance(x, (Tensor, *_VALUES))]


def _gathered(leaf: Any) -> Any:
    return gathered(leaf) if is_field(leaf) else leaf
