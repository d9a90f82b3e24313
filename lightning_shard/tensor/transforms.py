"""Function transforms of `torch.func` on split tensors: jvp, vjp and grad.

torch wraps tensors in levels of its own, which no rule could look through. So these three are
replaced, once a split tensor was made:

- jvp makes dual tensors of the ranks' parts. Inside another forward mode, and on simulated ranks,
  it differentiates backwards twice, for a process has one level of dual tensors.
- vjp, and with it grad, records a graph and goes backwards.

Where a split tensor meets torch's own levels, as inside of vmap, it raises. jvp of plain arguments
then starts again. A function under a transform must be pure, as in torch.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.domain.forward_mode import in_forward_mode, ranks_are_threads
from lightning_shard.ops.elementwise.whole_gradients import local_gradients, mean_over_ranks
from lightning_shard.processes.torch_private.internals import (
    dual_level,
    forward_ad,
    in_transform,
    replace_internal,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from lightning_shard.processes.torch_private.names import internal
from lightning_shard.tensor.local_mesh import LocalField
from lightning_shard.tensor.met import SplitInTransform, domains_met, note_domain
from lightning_shard.tensor.tensor import DomainTensor

Function = Callable[..., Any]
_EAGER = "torch._functorch.eager_transforms."


@functools.cache
def install_transforms() -> None:
    """Let torch.func take split tensors; called when the first one is made."""
    for name, make in {
        "_jvp_with_argnums": _jvp_for,
        "_vjp_with_argnums": _vjp_for,
        "grad_and_value_impl": _grad_for,
    }.items():
        replace_internal(_EAGER + name, make)


def _jvp_for(plain: Function) -> Function:
    def jvp(
        func: Function,
        primals: Any,
        tangents: Any,
        argnums: Any = None,
        *,
        strict: bool = False,
        has_aux: bool = False,
    ) -> Any:
        chosen = primals if argnums is None else _chosen(primals, argnums)
        flat, spec = tree_flatten(chosen)
        given, of_tangents = tree_flatten(tangents)
        usual = isinstance(primals, tuple) and spec == of_tangents and bool(flat)
        tensors = all(isinstance(x, Tensor) for x in (*flat, *given))
        if _in_transform(primals) or not usual or not tensors:  # torch tells what is wrong
            return plain(func, primals, tangents, argnums, strict=strict, has_aux=has_aux)
        in_tiles = any(isinstance(x, LocalField) for x in tree_leaves((primals, given)))
        if dual_level() < 0 and not _any_split((primals, given)):
            try:
                return _kept(
                    plain, func, primals, tangents, argnums, strict=strict, has_aux=has_aux
                )
            except SplitInTransform as met:
                in_tiles = met.in_tiles
        run = functools.partial(_called, func, primals, argnums)
        if dual_level() >= 0 or ranks_are_threads() or in_tiles:
            return _backwards_twice(run, flat, given, spec, has_aux)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(flat, given, strict=True)]
            result, aux = _with_aux(run(tree_unflatten(duals, spec)), has_aux, "jvp")
            leaves, of_result = tree_flatten(result)
            _check_outputs(leaves, "jvp")
            pairs = [forward_ad.unpack_dual(x) for x in leaves]
            aux = tree_map_only(Tensor, lambda x: forward_ad.unpack_dual(x).primal, aux)
        if strict and any(pair.tangent is None for pair in pairs):
            raise RuntimeError("jvp(f, primals, tangents): an output does not depend on the inputs")
        values = tree_unflatten([p.primal for p in pairs], of_result)
        slopes = [torch.zeros_like(p.primal) if p.tangent is None else p.tangent for p in pairs]
        return (values, tree_unflatten(slopes, of_result), *([aux] if has_aux else []))

    return jvp


def _backwards_twice(run: Function, flat: Any, given: Any, spec: Any, has_aux: bool) -> Any:
    """The jvp as the vjp of the vjp, which is linear in its cotangents."""
    result, pull, aux = _vjp(run, flat, spec, has_aux=has_aux)
    leaves, of_result = tree_flatten(result)
    zeros = [torch.zeros_like(x) for x in leaves]
    _, push, _ = _vjp(lambda seeds: pull(seeds), zeros, of_result)
    slopes = push(tree_unflatten(given, spec))
    return (result, slopes, *([aux] if has_aux else []))


def _vjp_for(plain: Function) -> Function:
    def vjp(func: Function, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
        if _in_transform(primals):
            return plain(func, *primals, argnums=argnums, has_aux=has_aux)
        chosen = primals if argnums is None else _chosen(primals, argnums, as_tuple=False)
        flat, spec = tree_flatten(chosen)
        run = functools.partial(_called, func, primals, argnums)
        result, pull, aux = _vjp(run, flat, spec, has_aux=has_aux)
        return (result, pull, *([aux] if has_aux else []))

    return vjp


def _vjp(
    run: Function, flat: Sequence[Any], spec: Any, *, has_aux: bool = False
) -> tuple[Any, Function, Any]:
    """The result of `run`, the function that pulls cotangents of it back, and what it adds."""
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad(), _met() as met:
        roots, inputs = zip(*map(_input_of, flat), strict=True)
        result, aux = _with_aux(run(tree_unflatten(inputs, spec)), has_aux, "vjp")
    leaves, of_result = tree_flatten(result)
    _check_outputs(leaves, "vjp")
    if not all(x.is_floating_point() or x.is_complex() for x in leaves):
        raise RuntimeError("vjp(f, ...): all outputs of f must be of floating point or complex")

    def freed(value: Any) -> Any:
        free = functools.partial(_free, roots=roots, recorded=recorded)
        return tree_map_only(Tensor, free, value)

    def pull(seeds: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given, of_seeds = tree_flatten(seeds)
        if of_seeds != of_result:
            raise RuntimeError(
                f"the cotangents have another structure ({of_seeds}) than the outputs ({of_result})"
            )
        kept = torch.is_grad_enabled() if create_graph is None else create_graph
        with torch.inference_mode(False):
            found = _pulled(leaves, inputs, given, met, retain_graph=retain_graph or kept)
        free = functools.partial(_free, roots=roots, recorded=kept)
        return tree_unflatten([free(g) for g in found], spec)

    return freed(result), pull, freed(aux)


def _pulled(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    met: list[Any],
    *,
    retain_graph: bool,
) -> list[Tensor]:
    """Gradients of the inputs, whole on every rank; zeros of those that nothing depends on."""
    split = _any_split((*outputs, *inputs))
    if in_transform() and (met or split):
        raise SplitInTransform
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    alone = bool(met) and not split
    with torch.enable_grad(), local_gradients() if alone else contextlib.nullcontext():
        if pairs:
            kept, given = ([*each] for each in zip(*pairs, strict=True))
            found = torch.autograd.grad(
                kept, [*inputs], given, retain_graph=retain_graph, create_graph=True,
                allow_unused=True,
            )  # fmt: skip
        whole = [
            torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)
        ]
        if alone:
            note_domain(met[0])
            whole = [mean_over_ranks(g, met[0]) for g in whole]
    return whole


def _input_of(x: Tensor) -> tuple[Tensor | None, Tensor]:
    """A tensor of the same values to differentiate by, and the leaf that was made for it."""
    x = x.clone() if x.is_inference() else x
    if x.requires_grad:
        return None, x.view_as(x)
    primal, tangent = forward_ad.unpack_dual(x) if in_forward_mode() else (x, None)
    leaf = primal.detach().requires_grad_()
    return leaf, leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def _free(x: Tensor, *, roots: Sequence[Tensor | None], recorded: bool) -> Tensor:
    """Without the graph that leads to our own leaves only."""
    if not x.requires_grad or in_forward_mode():
        return x
    own = {id(_local(root)) for root in roots if root is not None}
    return x if recorded and _leads_elsewhere(x, own) else x.detach()


def _leads_elsewhere(x: Tensor, own: set[int]) -> bool:
    if x.grad_fn is None:
        return id(_local(x)) not in own
    todo, seen = [_local(x).grad_fn], set[Any]()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DomainTensor) else x


@contextlib.contextmanager
def _met() -> Generator[list[Any]]:
    """Collect the domains of the split tensors that functions are called with inside."""
    met: list[Any] = []
    token = domains_met.set((*domains_met.get(), met))
    try:
        yield met
    finally:
        domains_met.reset(token)


def _grad_for(plain: Function) -> Function:
    def grad_and_value(func: Function, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
        if _in_transform((args, kwargs)):
            return plain(func, argnums, has_aux, args, kwargs)
        chosen = _chosen(args, argnums, as_tuple=False)
        flat, spec = tree_flatten(chosen)
        run = functools.partial(_called, functools.partial(func, **kwargs), args, argnums)
        result, pull, aux = _vjp(run, flat, spec, has_aux=has_aux)
        if not isinstance(result, Tensor) or result.ndim:
            raise RuntimeError(
                "grad_and_value(f)(*args): f must return a scalar tensor; got "
                f"{tuple(result.shape) if isinstance(result, Tensor) else type(result)}"
            )
        gradients = pull(torch.ones_like(result))
        return gradients, (result, aux) if has_aux else result

    return grad_and_value


def _kept(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own transform; where it meets a split tensor random numbers begin anew."""
    state = torch.get_rng_state()
    try:
        return plain(*args, **kwargs)
    except SplitInTransform:
        torch.set_rng_state(state)
        raise


def _chosen(args: Any, argnums: Any, **options: Any) -> Any:
    return internal(_EAGER + "_slice_argnums")(args, argnums, **options)


def _called(func: Function, args: tuple[Any, ...], argnums: Any, given: Any) -> Any:
    """Call `func` with `given` in the place of the arguments of those numbers."""
    if argnums is None:
        return func(*given)
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    values = given if isinstance(argnums, tuple) or _is_wrapped(given, args, argnums) else (given,)
    new = list(args)
    for number, value in zip(numbers, values, strict=True):
        new[number] = value
    return func(*new)


def _is_wrapped(given: Any, args: tuple[Any, ...], argnum: int) -> bool:
    """Return True of jvp, which takes a tuple for one number, too."""
    one = tree_flatten((args[argnum],))[1]
    return tree_flatten(given)[1] == one


def _with_aux(result: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(f"{name}: with has_aux=True the function returns (output, aux)")
    return result


def _check_outputs(leaves: Sequence[Any], name: str) -> None:
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        raise RuntimeError(f"{name}(f, ...): f must return tensors only, and at least one")


def _in_transform(arguments: Any) -> bool:
    if in_transform() and _any_split(arguments):  # torch's own levels would hide them
        raise SplitInTransform
    return in_transform()


def _any_split(value: Any) -> bool:
    return any(isinstance(x, DomainTensor | LocalField) for x in tree_leaves(value))
