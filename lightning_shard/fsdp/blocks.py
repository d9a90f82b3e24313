"""Chooses the blocks of a network: FSDP2 gathers the parameters of a block in one collective.

By default the repeated parts of a network are its blocks: siblings of one class, in lists and
sequences or as attributes (T5Block, spectral convolutions, residual blocks). Where blocks are
nested and the inner ones hold nearly all parameters, the inner ones are taken, since a smaller
block needs less memory. Parts with few parameters are gathered with what encloses them, since a
collective costs as much as sending some ten thousand numbers.

A large layer that stands alone, such as the first of a perceptron on a flattened field, is a block,
too, if it is called by itself: in a Sequential, or where no class of the network reads its weight.
"""

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from lightning_shard.processes.torch_private.internals import own_parameters
from lightning_shard.tensor.mixins import is_a

Wrap = Sequence[str] | Callable[[nn.Module], bool]

MIN_BLOCK_NUMEL = 100_000
COVERED = 0.9  # inner blocks with this share of a block's parameters take its place
LARGE_NUMEL = 4_000_000  # a layer of this size is a block wherever it stands
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_IN_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks(
    root: nn.Module, wrap: Wrap | None = None, min_num_params: int | None = None
) -> list[nn.Module]:
    """Find the modules under `root` that FSDP2 shall gather on their own, inner ones first.

    Args:
        root: The whole network, which is not among them.
        wrap: Class names, or a function that says whether a module is a block.
        min_num_params: Or the number of parameters from which on a module is a block, those of
            inner blocks not counted.

    Raises:
        ValueError: There is no module of a class in `wrap`, or both arguments are given.
    """
    if wrap is not None and min_num_params is not None:
        raise ValueError("wrap and min_num_params both choose the blocks; give one of them.")
    return _ties_kept(root, _inner_first(_wanted(root, wrap, min_num_params)))


def _inner_first(found: list[nn.Module]) -> list[nn.Module]:
    """Put blocks before those that enclose them, and leave the others where they are.

    A module that is held twice was found at its first holder, and something else may enclose it.
    """
    ordered: dict[nn.Module, None] = {}

    def add(block: nn.Module) -> None:
        if block not in ordered:
            inside = {*block.modules()} - {block}
            for inner in found:
                if inner in inside:
                    add(inner)
            ordered[block] = None

    for block in found:
        add(block)
    return list(ordered)


def _wanted(root: nn.Module, wrap: Wrap | None, min_num_params: int | None) -> list[nn.Module]:
    if callable(wrap):
        return _chosen(root, wrap)
    if wrap is not None:
        chosen = named(root, wrap, "wrap")
        return _chosen(root, lambda module: module in chosen)
    if min_num_params is not None:
        found: list[nn.Module] = []
        _by_size(root, min_num_params, found)
        return [module for module in found if module is not root]
    return list(dict.fromkeys(_Search(root).blocks_in(root, enclosed=False)))


def named(root: nn.Module, names: Sequence[str], option: str) -> set[nn.Module]:
    """Find the modules under `root` whose class has one of `names`.

    Raises:
        ValueError: A class is not there; `option` names the argument.
    """
    classes = {type(m).__name__ for m in root.modules() if m is not root}
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in classes:
            near = difflib.get_close_matches(name, classes, n=3, cutoff=0.5)
            hint = " or ".join(near) if near else ", ".join(sorted(classes)) or "none"
            raise ValueError(
                f"{option}: the network has no module of class {name!r}; "
                f"{'did you mean' if near else 'its classes are'} {hint}{'?' if near else '.'}"
            )
    return {m for m in root.modules() if type(m).__name__ in names}


def _chosen(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Children before parents, as FSDP2 wants them."""
    return [
        module
        for module in reversed(list(root.modules()))
        if module is not root and can_be_gathered(module) and wanted(module)
    ]


def _by_size(module: nn.Module, least: int, found: list[nn.Module]) -> int:
    """Append the blocks of `module`; return the number of its parameters outside of them."""
    if module in found:
        return 0
    inside = {p for child in module.children() for p in child.parameters()}
    rest = sum(p.numel() for p in module.parameters() if p not in inside)
    if isinstance(module, nn.MultiheadAttention):  # reads its parts' parameters itself
        rest += sum(p.numel() for p in inside)
    else:
        rest += sum(_by_size(child, least, found) for child in module.children())
    if rest < least or not can_be_gathered(module):
        return rest
    found.append(module)
    return 0


class _Search:
    """Finds the blocks of a network by itself."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._shared = _shared_parameters(root)
        held = Counter(child for module in root.modules() for child in module.children())
        self._common = {
            m for m, n in held.items() if n > 1 and next(m.children(), None) is not None
        }

    def blocks_in(self, module: nn.Module, *, enclosed: bool) -> Iterator[nn.Module]:
        """The blocks under `module`; `enclosed`: it is part of a repeated module."""
        children = {
            n: c for n, c in module.named_children() if next(c.parameters(), None) is not None
        }
        kinds = Counter(type(child) for child in children.values())
        listed = isinstance(module, _IN_LISTS) and len(module) > 1
        for name, child in children.items():
            composite = any(True for _ in child.children()) or not _is_of_torch(child)
            alike = kinds[type(child)] > 1 and composite and not self._has_a_common_part(child)
            inner = list(self.blocks_in(child, enclosed=enclosed or alike))
            size = _numel(child, self._shared)
            covered = sum(_numel(part, self._shared) for part in inner) >= COVERED * size
            block = (alike or (listed and not enclosed)) and size >= MIN_BLOCK_NUMEL
            if type(child) in _LAYERS and size >= LARGE_NUMEL:
                block = block or isinstance(module, nn.Sequential)
                # last, since it reads the sources of the network's classes
                block = block or (not enclosed and not _is_read(name, self._root))
            yield from [child] if block and not covered and can_be_gathered(child) else inner

    def _has_a_common_part(self, module: nn.Module) -> bool:
        """Return True if a part with layers is reached past `module`, too.

        Its hooks may run layers of all that hold it, as torchgeo's BYOL does: so those are whole.
        """
        parts = self._common.intersection(module.modules()) - {module}
        return bool(parts) and not parts.isdisjoint(_outside(module, self._root))


def _is_read(layer: str, root: nn.Module) -> bool:
    """Return True if a class of the network reads the parameters of a layer, as its source says."""
    ways = re.compile(
        rf"\b{layer}\.(weight|bias|\w*parameters|state_dict)|self\.(named_)?parameters\("
    )
    kinds = {kind for m in root.modules() for kind in type(m).__mro__ if not _is_known(kind)}
    return any(map(ways.search, map(_steps_of, kinds)))


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (
        "torch",
        "lightning",
        "pytorch_lightning",
        "builtins",
    )


def _steps_of(kind: type) -> str:
    """Return the source of a class, but for where it makes parameters and optimizers."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made in a shell, so nobody knows
        return "self.parameters()"
    made = r"\n( +)def (?:__init__|configure_optimizers)\b.*?(?=\n\1[^\s)]|\Z)"
    return re.sub(made, "", source, flags=re.DOTALL)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def can_be_gathered(module: nn.Module) -> bool:
    """Return True if its own forward runs when its parameters are needed.

    Containers have none, and the layers of tltorch's tensors read the factors themselves.
    """
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not is_a(module, "tltorch", "FactorizedTensor")


def _numel(module: nn.Module, shared: set[nn.Parameter]) -> int:
    return sum(p.numel() for p in module.parameters() if p not in shared)


def _holders(root: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that hold each parameter."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in root.modules():
        for p in own_parameters(module).values():
            if p is not None:
                holders.setdefault(p, []).append(module)
    return holders


def _shared_parameters(root: nn.Module) -> set[nn.Parameter]:
    return {p for p, modules in _holders(root).items() if len(modules) > 1}


def _ties_kept(root: nn.Module, chosen: list[nn.Module]) -> list[nn.Module]:
    """Return `chosen` without the blocks that leave a tied parameter to nobody.

    A parameter that several blocks reach is gathered with the block that encloses them all. FSDP2
    finds it there only if some module that holds it is reached without an inner block.
    """
    owners = _owners(root, {*chosen})
    for modules in _holders(root).values():
        found = {owner for m in modules for owner in owners[m]}
        if len(found) < 2:
            continue
        around = (b for b in chosen if not _outside(b, root) & {*modules})
        enclosing = next(around, root)
        if enclosing not in found:
            # the first in the module among equal ones: a set has another order on each rank
            in_order = [block for block in [*chosen, root] if block in found]
            least = min(in_order, key=lambda b: sum(p.numel() for p in b.parameters()))
            return _ties_kept(root, [b for b in chosen if b is not least])
    return chosen


def _owners(root: nn.Module, chosen: set[nn.Module]) -> dict[nn.Module, set[nn.Module]]:
    """Return for each module the innermost blocks on the ways from `root` to it."""
    owners: dict[nn.Module, set[nn.Module]] = {}
    waiting = [(root, root)]
    while waiting:
        module, owner = waiting.pop()
        owner = module if module in chosen else owner
        if owner not in owners.setdefault(module, set()):
            owners[module].add(owner)
            waiting.extend((child, owner) for child in module.children())
    return owners


def _outside(block: nn.Module, root: nn.Module) -> set[nn.Module]:
    """Return the modules that are reached from `root` on a way that does not go through `block`."""
    found: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module is not block and module not in found:
            found.add(module)
            waiting.extend(module.children())
    return found


def tied_outside(block: nn.Module, root: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of `block` that are reached without passing through it, too."""
    own, holders, outside = set(block.parameters()), _holders(root), _outside(block, root)
    return {p for p in own if not outside.isdisjoint(holders[p])}
