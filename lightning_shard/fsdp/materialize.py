"""Modules of the meta device get memory after they are sharded, and first values one by one.

Each module's `reset_parameters` runs on whole tensors of that module, of which every rank keeps its
shard, in the order in which constructors call it. So all ranks hold the weights that building the
network on a device gives with the same seed, and none ever holds more than its shards and the
largest module that resets itself. Source: torch's contract of `reset_parameters` in
https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html (meta-device initialisation).
"""

import difflib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import UninitializedParameter

from lightning_shard.fsdp.complex_pairs import pair_names
from lightning_shard.processes.torch_private.internals import (
    own_buffers,
    own_parameters,
    unsaved_buffers,
)
from lightning_shard.processes.torch_private.typed import named_modules

_DEFERRED = "_deferred"  # attribute of a parameter with memory: the one that replaced it


@contextmanager
def deferred_parameters() -> Generator[None]:
    """Build modules whose parameters have no memory until the module is sharded.

    Parameters lie on the meta device; buffers have their values, such as those of positions, which
    no file holds. The strategy and `parallelize` give the parameters memory once they are sharded,
    and first values: those of a file or folder (`init_weights_from` of the strategy; in a script
    `parallelize(..., loaded=[""])`, then `load_weights`), else those of `reset_parameters`.
    Parameters that are tied stay tied.

    Example:
        >>> config = AutoConfig.from_pretrained("models/t5-base")
        >>> with deferred_parameters():
        ...     network = AutoModelForSeq2SeqLM.from_config(config)
    """
    register = nn.Module.register_parameter

    def deferring(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta or isinstance(param, UninitializedParameter):
            return
        if (without := param.__dict__.get(_DEFERRED)) is None:
            without = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            for key, value in vars(param).items():
                setattr(without, key, value)
            setattr(param, _DEFERRED, without)  # it may be registered again, where it is tied
        own_parameters(self)[name] = without

    nn.Module.register_parameter = deferring
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def is_deferred(module: nn.Module) -> bool:
    """Return True if a parameter or buffer is on the meta device."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def check_can_be_reset(root: nn.Module, loaded: Sequence[str]) -> None:
    """Refuse modules that cannot make their values.

    Args:
        root: The whole network.
        loaded: Names of submodules whose parameters and saved buffers come from a file; "" is all.

    Raises:
        ValueError: With the names of modules that have no `reset_parameters` and need it.
    """
    from_file = _parts(root, loaded)
    helpless = [
        f"{name} ({type(module).__name__})"
        for name, module in named_modules(root)
        if _needs_reset(module, module in from_file) and _reset_of(module) is None
    ]
    if helpless:
        more = f" and {len(helpless) - 5} more" if len(helpless) > 5 else ""
        raise ValueError(
            f"these modules are on the meta device and have no reset_parameters() to make their "
            f"first values: {', '.join(helpless[:5])}{more}. Give them one, build them on a real "
            "device, build the network within lightning_shard.deferred_parameters(), where buffers "
            "have values, or load weights with init_weights_from (which brings no buffers that are "
            "not saved)."
        )


def _parts(root: nn.Module, names: Sequence[str]) -> set[nn.Module]:
    """Return the modules under those of these names.

    Raises:
        ValueError: There is none of this name.
    """
    known = dict(root.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or [*dict(root.named_children())]
            raise ValueError(
                f"{type(root).__name__} has no submodule {name!r}, which init_weights_from (or "
                f"loaded, in a script) names; use one of {', '.join(map(repr, near))}, or '' for "
                "the whole module."
            )
    return {m for name in names for m in known[name].modules()}


@torch.no_grad()
def materialize(
    root: nn.Module,
    device: torch.device,
    *,
    shards_on: torch.device | None = None,
    loaded: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> dict[nn.Parameter, nn.Parameter]:
    """Give what is on the meta device memory, and values where no file brings them.

    Args:
        root: The network, sharded or not.
        device: The device of buffers, whole parameters and the random numbers.
        shards_on: The device of sharded parameters, if it is another one.
        loaded: Names of submodules whose parameters are to be loaded.
        group: Ranks that draw the numbers which its first one would draw.

    Returns:
        The new parameter of each old one.
    """
    if not is_deferred(root):
        return {}
    from_file = _parts(root, loaded)
    wanted = [m for m in _children_first(root) if _needs_reset(m, m in from_file)]
    if group is not None:
        _share_generators(device, group)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, p in own_parameters(module).items():
            if p is not None and p.is_meta:
                place = (shards_on or device) if isinstance(p, DTensor) else device
                if p not in moved:
                    moved[p] = nn.Parameter(torch.empty_like(p, device=place), p.requires_grad)
                own_parameters(module)[name] = moved[p]
        for name, buffer in own_buffers(module).items():
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    unmade, first = set(moved.values()), dict[nn.Parameter, nn.Module]()
    for module in wanted:
        _reset_whole(module, device, unmade, first)
    return moved


def _reset_whole(
    module: nn.Module,
    device: torch.device,
    unmade: set[nn.Parameter],
    first: dict[nn.Parameter, nn.Module],
) -> None:
    """Reset `module` while its parameters, and those of what is inside it, are whole."""
    reset = _reset_of(module)
    assert reset is not None
    pairs = pair_names(module)
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter, bool]] = []
    for prefix, part in named_modules(module):
        for name, p in own_parameters(part).items():
            if p is not None:
                paired = (f"{prefix}.{name}" if prefix else name) in pairs
                places.append((part, name, p, paired))
                if p not in wholes:
                    wholes[p] = _whole(p, device, paired, known=p not in unmade)
    for part, name, p, _ in places:
        own_parameters(part)[name] = wholes[p]
    try:
        reset()
    finally:
        for part, name, p, _ in places:
            own_parameters(part)[name] = p
    for part, _, p, paired in places:
        # the first of tied modules made the value
        if part is not module or first.setdefault(p, module) is module:
            _keep_part(p, wholes[p], paired)
            unmade.discard(p)


def _whole(p: nn.Parameter, device: torch.device, paired: bool, *, known: bool) -> nn.Parameter:
    if known:
        whole = (p.full_tensor() if isinstance(p, DTensor) else p.detach()).clone()
    else:
        whole = torch.empty(p.shape, dtype=p.dtype, device=device)
    whole = whole.to(device)
    return nn.Parameter(torch.view_as_complex(whole) if paired else whole, p.requires_grad)


def _keep_part(p: nn.Parameter, whole: Tensor, paired: bool) -> None:
    value = torch.view_as_real(whole.detach()) if paired else whole.detach()
    if isinstance(p, DTensor):
        part = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        p.to_local().copy_(part.to_local())
    else:
        p.copy_(value)


def _needs_reset(module: nn.Module, from_file: bool) -> bool:
    """Return True if `module` itself holds tensors that only a reset gives values."""
    own = [*own_parameters(module).values(), *own_buffers(module).values()]
    if from_file:
        own = [own_buffers(module).get(name) for name in unsaved_buffers(module)]
    return any(t is not None and t.is_meta for t in own)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Some of torch's modules, such as MultiheadAttention, have it with an underscore."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Any = getattr(module, name, None)
        if reset is not None:
            return reset
    return None


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Give the modules in the order in which constructors end: parts before the whole."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from walk(child)
        yield module

    return walk(module)


def _share_generators(device: torch.device, group: dist.ProcessGroup) -> None:
    owners = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    states = [owner.get_rng_state() for owner in owners]
    dist.broadcast_object_list(states, group=group, group_src=0, device=device)
    for owner, state in zip(owners, states, strict=True):
        owner.set_rng_state(state)
