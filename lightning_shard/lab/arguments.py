"""Reads the arguments that `check`, `certify`, `plan`, `predict` and `best` share."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from operator import index
from typing import Any

Mesh = tuple[int, ...]  # data replicas, and the ranks along each split dim

# earlier ways to say the mesh
_SAID_BY_MESH = ("processes", "domain_parallel_size", "data_parallel_size")
# what a run of the laboratory decides itself
_DECIDED_HERE = ("strategy", "devices", "num_nodes", "max_steps", "max_epochs", "callbacks")


def read_mesh(mesh: int | str | Sequence[int]) -> Mesh:
    """Return the number of data replicas, and the number of ranks along each split dim.

    Args:
        mesh: `(4, 2)` or `"4x2"` for 4 data replicas, each of 2 ranks that share its samples;
            `(1, 2, 2)` splits two dims. A whole number `n` is `(1, n)`.

    Raises:
        ValueError: It has no domain, or a size that is no whole number from 1 on.

    Example:
        >>> read_mesh("4x2"), read_mesh(2)
        ((4, 2), (1, 2))
    """
    try:
        if isinstance(mesh, str):
            sizes = tuple(map(int, mesh.lower().split("x")))
        else:
            sizes = (1, mesh) if isinstance(mesh, int) else tuple(map(index, mesh))
    except (TypeError, ValueError):
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(
            "a mesh is data replicas x ranks of a domain, such as 2x2 or (1, 2, 2), or a number of "
            f"ranks that share each sample; got {mesh!r}."
        )
    return sizes


def shown(sizes: Sequence[int]) -> str:
    """Return the text of a mesh or of extents, such as "4x2"."""
    return "x".join(map(str, sizes))


def check_trainer_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse further arguments of a function that are not the Trainer's.

    Args:
        function: Takes arguments of its own, and passes all others to a Trainer.
        options: Those others, by name.

    Raises:
        TypeError: One of them is mistyped, or this function decides it.
    """
    from lightning.pytorch import Trainer  # here: the command line reads meshes without it

    own = [p.name for p in inspect.signature(function).parameters.values()
           if p.kind is not p.VAR_KEYWORD]  # fmt: skip
    known = [*own, *inspect.signature(Trainer).parameters]
    for name in options:
        if name in _SAID_BY_MESH:
            reason = 'say it by the mesh, such as mesh="4x2" for 4 data replicas x 2 ranks of each'
        elif name in _DECIDED_HERE:
            reason = f"{function.__name__} decides it"
        elif name not in known:
            close = get_close_matches(name, known, 1)
            reason = f"did you mean '{close[0]}'?" if close else "the Trainer has none, either"
        else:
            continue
        raise TypeError(f"{function.__name__} takes no argument '{name}': {reason}")
