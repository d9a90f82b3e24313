"""Serves both packages that are Lightning, `lightning` and `pytorch_lightning`, from one source.

They are the same code under two names, so a Trainer of one takes no strategy, accelerator or module
of the other. The files that import Lightning are therefore executed a second time where
`pytorch_lightning` is imported: as modules of `lightning_shard.for_pytorch_lightning`, in which an
import of `lightning.pytorch` gives `pytorch_lightning`. Without that package nothing happens here.

An object of ours does not know which Trainer it will be given to. Where the other package asks, it
says that it belongs there, and becomes an instance of the class of the same name.
"""

import builtins
import functools
import importlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

LIGHTNING, OLDER = "lightning", "pytorch_lightning"
_OWN, _TWIN = "lightning_shard.", f"lightning_shard.for_{OLDER}."
_ROOMS = ("lightning_shard.trainer", "lightning_shard.lab", "lightning_shard.cli")
# parts of these rooms that do without Lightning, and whose objects both copies exchange
SHARED = tuple(
    f"lightning_shard.lab.{name}"
    for name in ("aligned", "calibrate", "clusters", "kernels", "machine", "machine_file",
                 "simulate", "simulated", "timeline")
)  # fmt: skip
# the second copy gets these for an import; the first that begins a name counts
_INSTEAD = {
    "lightning.pytorch": OLDER,
    "lightning.fabric": "lightning_fabric",
    "lightning": OLDER,
    **{name: name for name in SHARED},
    **{room: room.replace(_OWN, _TWIN) for room in _ROOMS},
}
_NAMES = (
    "trainer.xpu.accelerator",
    "trainer.strategy",
    "trainer.fabric",
)  # these register our names

_chosen: list[str] = []  # by the command line
_taken_for: list[tuple[type, str]] = []  # classes of ours, each with the base that a Trainer asks


def install() -> None:
    """Let the second copy be imported, and be made where `pytorch_lightning` is."""
    sys.meta_path.insert(0, _Finder())
    if OLDER in sys.modules:
        tell(OLDER)


def tell(package: str) -> None:
    """Let the registries of a package know "xpu" and "hybrid_shard"; it has no entry point."""
    for name in _NAMES:
        importlib.import_module(_module_for(package, f"{_OWN}{name}"))


def choose(package: str) -> None:
    """Let the public names be those for a package from now on."""
    _chosen[:] = [package]


def choose_by(paths: Iterable[str]) -> None:
    """Choose the package of the first LightningModule among the dotted paths of classes."""
    if find_spec(OLDER) is None:
        return
    for path in paths:
        module, _, name = path.rpartition(".")
        if not all(part.isidentifier() for part in path.split(".")) or not module:
            continue
        with suppress(Exception):  # the parser says what is wrong with a path
            kind = getattr(importlib.import_module(module), name)
            if isinstance(kind, type) and hasattr(kind, "configure_optimizers"):
                choose(package_of(kind) or LIGHTNING)
                return


def of_chosen(module: str) -> str:
    """Name the copy of a module that belongs to the package of this program.

    That is the chosen one; else the one that is imported; of both `lightning`.
    """
    only_older = OLDER in sys.modules and "lightning.pytorch" not in sys.modules
    return _module_for(_chosen[0] if _chosen else OLDER if only_older else LIGHTNING, module)


def package_of(thing: Any) -> str | None:
    """Return the package of Lightning that a class or the class of an object extends, if any."""
    kind: type[Any] = thing if isinstance(thing, type) else type(thing)
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((root for root in roots if root in (LIGHTNING, OLDER)), None)


def introduce(kind: type, base: str) -> None:
    """Let the Trainers of both packages take the instances of a class of ours.

    Args:
        kind: The class.
        base: The class for which a Trainer takes them, as `lightning.pytorch.strategies.Strategy`.
    """
    _taken_for.append((kind, base))
    _introduce_all()


def in_both_packages(name: str) -> list[ModuleType]:
    """Return the module of Lightning with this name, and that of the other package, as loaded."""
    found = (sys.modules.get(there) for there in (name, _instead(name)))
    return [module for module in found if module is not None]


def _introduce_all() -> None:
    for ours, asked in _taken_for:
        module, _, name = asked.rpartition(".")
        for loaded in in_both_packages(module):
            other = getattr(loaded, name, None)
            if isinstance(other, ABCMeta) and not issubclass(ours, other):
                other.register(ours)


def become_of(instance: Any, package: str | None) -> bool:
    """Turn an object of ours into one for another package; return True if it was not before.

    Args:
        instance: An object whose class is in one of the copies.
        package: The package; None or another name leaves the object.

    Raises:
        TypeError: The class extends one of ours for one package only.
    """
    kind: Any = instance.__class__
    if package not in (LIGHTNING, OLDER) or package_of(kind) in (package, None):
        return False
    if not kind.__module__.startswith(_OWN):
        ours = next(base for base in kind.__mro__ if base.__module__.startswith(_OWN))
        there = _module_for(package, ours.__module__)
        raise TypeError(
            f"{kind.__name__} extends {ours.__name__} for the package {package_of(kind)}, but the "
            f"Trainer is of {package}; extend the class of the same name for that package: "
            f"from {there} import {ours.__name__}."
        )
    module = importlib.import_module(_module_for(package, kind.__module__))
    instance.__class__ = getattr(module, kind.__name__)
    return True


def own_module(instance: Any, name: str) -> Any:
    """Import the module of ours of this name that serves the package of an object."""
    return importlib.import_module(_module_for(package_of(instance) or LIGHTNING, name))


def caller(depth: int = 2) -> str:
    """Name the module whose code calls the function that asks, as if Fabric were in Lightning."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage] - of Python, documented
    return name.replace("lightning_fabric", f"{OLDER}.fabric")


def by_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a LightningModule: for one of the other package its own copy is called."""

    @functools.wraps(function)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the copy of the function that belongs to the module's package."""
        copy = importlib.import_module(
            _module_for(package_of(module) or LIGHTNING, function.__module__)
        )
        return getattr(copy, function.__name__)(module, *args, **kwargs)

    vars(call)["__signature__"] = importlib.import_module("inspect").signature(function)
    return call


def _module_for(package: str, module: str) -> str:
    """Name the copy of one of our modules that belongs to a package."""
    own = module.replace(_TWIN, _OWN, 1)
    return _instead(own) if package == OLDER else own


def _instead(name: str) -> str:
    """Name what the second copy gets for an import."""
    for own, other in _INSTEAD.items():
        if f"{name}.".startswith(f"{own}."):
            return other + name[len(own) :]
    return name


def _import(
    name: str,
    globals: Any = None,  # noqa: A002 - as in builtins.__import__
    locals: Any = None,  # noqa: A002
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    return builtins.__import__(_instead(name), globals, locals, fromlist, level)


class _Finder:
    """Finds the modules of the second copy, and sees when a package of Lightning is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if f"{fullname}.".startswith(_TWIN):
            own = find_spec((_OWN + fullname[len(_TWIN) :]).rstrip("."))
            return own and _spec_of_copy(fullname, own)
        then = {OLDER: functools.partial(tell, OLDER), "lightning.pytorch": _introduce_all}
        if fullname not in then:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Any", _Then(spec.loader, then[fullname]))
        return spec


def _spec_of_copy(name: str, own: ModuleSpec) -> ModuleSpec:
    whole = own.name == _OWN.rstrip(".")  # the copy's package itself, which is empty
    spec = ModuleSpec(name, cast("Any", _Copy(own)), origin=own.origin)
    spec.submodule_search_locations = [] if own.submodule_search_locations else None
    spec.has_location = not whole
    return spec


class _Copy:
    """Executes the code of one of our modules as another, with other imports."""

    def __init__(self, own: ModuleSpec) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        if self._own.name == _OWN.rstrip("."):
            importlib.import_module(OLDER)  # whole, before the first of its names is used
            return
        loader: Any = self._own.loader
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        exec(loader.get_code(self._own.name), vars(module))


class _Then:
    """Loads a package of Lightning as its own loader does, and calls a function then."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
